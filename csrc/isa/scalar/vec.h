// Plain C++: eight floats in an array. Complete, and the fallback everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace twostep::scalar {

struct V {
  static constexpr int W = 8;
  struct F {
    float v[W];
  };
  struct I {
    int32_t v[W];
  };

#define TWOSTEP_EACH(expr) \
  F r;                     \
  for (int i = 0; i < W; i++) r.v[i] = (expr); \
  return r
#define TWOSTEP_EACH_I(expr) \
  I r;                       \
  for (int i = 0; i < W; i++) r.v[i] = (expr); \
  return r

  static F zero() { TWOSTEP_EACH(0.0f); }
  static F set1(float x) { TWOSTEP_EACH(x); }
  static F load(const float* p) { TWOSTEP_EACH(p[i]); }
  // The first n lanes, zeros behind; nothing beyond is touched. 0 <= n <= W.
  static F load_n(const float* p, int n) { TWOSTEP_EACH(i < n ? p[i] : 0.0f); }
  static void store(float* p, F a) {
    for (int i = 0; i < W; i++) p[i] = a.v[i];
  }
  static void store_n(float* p, F a, int n) {
    for (int i = 0; i < n; i++) p[i] = a.v[i];
  }
  static F load_f16(const uint16_t* p) { TWOSTEP_EACH(f16_to_f32(p[i])); }
  static F load_bf16(const uint16_t* p) { TWOSTEP_EACH(bf16_to_f32(p[i])); }
  static void store_f16(uint16_t* p, F a) {
    for (int i = 0; i < W; i++) p[i] = f32_to_f16(a.v[i]);
  }
  static void store_bf16(uint16_t* p, F a) {
    for (int i = 0; i < W; i++) p[i] = f32_to_bf16(a.v[i]);
  }
  static F add(F a, F b) { TWOSTEP_EACH(a.v[i] + b.v[i]); }
  static F sub(F a, F b) { TWOSTEP_EACH(a.v[i] - b.v[i]); }
  static F mul(F a, F b) { TWOSTEP_EACH(a.v[i] * b.v[i]); }
  static F div(F a, F b) { TWOSTEP_EACH(a.v[i] / b.v[i]); }
  static F fma(F a, F b, F c) { TWOSTEP_EACH(std::fma(a.v[i], b.v[i], c.v[i])); }
  static F max(F a, F b) { TWOSTEP_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
  static F min(F a, F b) { TWOSTEP_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
  static F abs(F a) { TWOSTEP_EACH(std::fabs(a.v[i])); }
  static F round(F a) { TWOSTEP_EACH(std::nearbyint(a.v[i])); }
  // 2^n for integral n in -126..127
  // a * 2^n, n a whole number from -126 to 127
  static F scale(F a, F n) { TWOSTEP_EACH(a.v[i] * std::ldexp(1.0f, static_cast<int>(n.v[i]))); }
  // Lane i of the first n keeps a, the others become b.
  static F keep_n(F a, F b, int n) { TWOSTEP_EACH(i < n ? a.v[i] : b.v[i]); }
  // Pairwise tree: the same order on every call.
  static float reduce_add(F a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
  }
  static float reduce_max(F a) {
    float m = a.v[0];
    for (int i = 1; i < W; i++) m = m > a.v[i] ? m : a.v[i];
    return m;
  }
  // The larger of non-negative values by their bits: NaN > infinity > every number.
  static F max_bits(F a, F b) { TWOSTEP_EACH(larger_bits(a.v[i], b.v[i])); }
  static float reduce_max_bits(F a) {
    float m = a.v[0];
    for (int i = 1; i < W; i++) m = larger_bits(m, a.v[i]);
    return m;
  }
  static float larger_bits(float a, float b) {
    int32_t x, y;
    std::memcpy(&x, &a, 4);
    std::memcpy(&y, &b, 4);
    return x > y ? a : b;
  }
  static I to_int(F a) { TWOSTEP_EACH_I(static_cast<int32_t>(std::nearbyint(a.v[i]))); }
  static F to_float(I a) { TWOSTEP_EACH(static_cast<float>(a.v[i])); }
  static I add_i(I a, I b) { TWOSTEP_EACH_I(a.v[i] + b.v[i]); }
  static int32_t reduce_add_i(I a) {
    int32_t s = 0;
    for (int i = 0; i < W; i++) s += a.v[i];
    return s;
  }
  // Lanes are within -128..127.
  static void store_i8(int8_t* p, I a) {
    for (int i = 0; i < W; i++) p[i] = static_cast<int8_t>(a.v[i]);
  }
#undef TWOSTEP_EACH
#undef TWOSTEP_EACH_I
};

}  // namespace twostep::scalar
