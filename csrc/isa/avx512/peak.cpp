#include "isa/peak.h"

#include "isa/avx512/linear_dot.h"

namespace twostep::avx512 {
namespace {

constexpr int kChains = 12;  // latency 4 or 5, up to two a cycle

double int8(int64_t rounds, float* sink) {
  __m512i w = _mm512_set1_epi8(1), a = _mm512_set1_epi8(1), sum[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) sum[i] = _mm512_set1_epi32(i);
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));  // another vector each time, for all the compiler knows
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], w, a);
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
  _mm512_storeu_si512(sink, sum[0]);
  return 2.0 * 64 * kChains * static_cast<double>(rounds);
}

double bf16(int64_t rounds, float* sink) {
  __m512i w = _mm512_setzero_si512(), a = _mm512_setzero_si512();
  __m512 sum[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) sum[i] = _mm512_dpbf16_ps(sum[i], Dot::as_bf16(w), Dot::as_bf16(a));
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  _mm512_storeu_ps(sink, sum[0]);
  return 2.0 * 32 * kChains * static_cast<double>(rounds);
}

double fp32(int64_t rounds, float* sink) {
  __m512 w = _mm512_setzero_ps(), a = _mm512_set1_ps(1), sum[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) sum[i] = _mm512_fmadd_ps(w, a, sum[i]);
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  _mm512_storeu_ps(sink, sum[0]);
  return 2.0 * 16 * kChains * static_cast<double>(rounds);
}

const PeakKernels kTable = {int8, bf16, fp32};

}  // namespace
extern const PeakKernels* const kPeakKernels;
const PeakKernels* const kPeakKernels = &kTable;
}  // namespace twostep::avx512
