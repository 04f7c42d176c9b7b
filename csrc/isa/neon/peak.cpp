#include "isa/peak.h"

#include <arm_neon.h>

namespace twostep::neon {
namespace {

constexpr int kChains = 16;  // latency 3 or 4, up to four a cycle

double int8(int64_t rounds, float* sink) {
  int8x16_t w = vdupq_n_s8(1), a = vdupq_n_s8(1);
  int32x4_t sum[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; i++) sum[i] = vdupq_n_s32(i);
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+w"(w), "+w"(a));  // another vector each time, for all the compiler knows
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) sum[i] = vdotq_s32(sum[i], w, a);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; i++) vst1q_f32(sink + 4 * i, vreinterpretq_f32_s32(sum[i]));
  return 2.0 * 16 * kChains * static_cast<double>(rounds);
}

double fp32(int64_t rounds, float* sink) {
  float32x4_t w = vdupq_n_f32(0), a = vdupq_n_f32(1), sum[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; i++) sum[i] = vdupq_n_f32(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+w"(w), "+w"(a));
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) sum[i] = vfmaq_f32(sum[i], w, a);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kChains; i++) vst1q_f32(sink + 4 * i, sum[i]);
  return 2.0 * 4 * kChains * static_cast<double>(rounds);
}

// The kernels have no bf16 arithmetic: eight numbers are widened by two shifts, then FMAs.
double bf16(int64_t rounds, float* sink) {
  constexpr int kRows = kChains / 2;  // that share the widened numbers, as rows of a tile do
  uint16x8_t w = vdupq_n_u16(0);
  float32x4_t a = vdupq_n_f32(1), low[kRows], high[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i++) low[i] = high[i] = vdupq_n_f32(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+w"(w), "+w"(a));
    const float32x4_t first = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(w), 16));
    const float32x4_t second = vreinterpretq_f32_u32(vshll_high_n_u16(w, 16));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) {
      low[i] = vfmaq_f32(low[i], first, a);
      high[i] = vfmaq_f32(high[i], second, a);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i++) {
    vst1q_f32(sink + 8 * i, low[i]);
    vst1q_f32(sink + 8 * i + 4, high[i]);
  }
  return 2.0 * 8 * kRows * static_cast<double>(rounds);
}

const PeakKernels kTable = {int8, bf16, fp32};

}  // namespace
extern const PeakKernels* const kPeakKernels;
const PeakKernels* const kPeakKernels = &kTable;
}  // namespace twostep::neon
