// Kernels that work on one row of float32 at a time.
#pragma once
#include "core/act.h"

namespace twostep {

struct RmsNormArgs {
  const float* x;       // [width]
  const float* weight;  // [width]
  int width;
  float eps;
};

struct LayerNormArgs {
  const float* x;       // [width]
  const float* weight;  // [width]
  const float* bias;    // [width]
  int width;
  float eps;
};

struct RowKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
  void (*rms_norm)(const RmsNormArgs&, float* y);
  // residual += rms_norm(x) (Gemma 3 norms what it adds).
  void (*rms_norm_add)(const RmsNormArgs&, float* residual);
  // The same values of `count` rows, at most kMaxTileRows, written as rows m .. m + count - 1 of an
  // activation, all in tile (r0, rows). x: a pointer for each; that of the arguments is not used.
  void (*rms_norm_act)(const RmsNormArgs&, const float* const* x, int count, const Act&, int r0, int rows,
                       int m);
  // Row m of an activation from plain float32.
  void (*put_row)(const float* x, const Act&, int r0, int rows, int m);
  // y += x, [n]
  void (*add)(float* y, const float* x, int n);
  // y = cap * tanh(y / cap), [n]
  void (*softcap)(float* y, float cap, int n);
  // y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; y may be x.
  void (*layer_norm)(const LayerNormArgs&, float* y);
  void (*layer_norm_act)(const LayerNormArgs&, const Act&, int r0, int rows, int m);
  // y = x * Phi(x), the exact GELU, [n]; y may be x.
  void (*gelu)(const float* x, float* y, int n);
  void (*gelu_act)(const float* x, const Act&, int r0, int rows, int m);
};

}  // namespace twostep
