#include "isa/peak.h"

#include "isa/avx2/vec.h"

namespace twostep::avx2 {
namespace {

// As the kernels do it for 4-bit weights, the fastest case: eight vpmaddubsw gathered in int16, then
// one vpmaddwd to int32. Four chains: 14 of the 16 registers.
double int8(int64_t rounds, float* sink) {
  constexpr int kChains = 4, kRun = 8;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i w[kChains], sum[kChains], a = _mm256_set1_epi8(1);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) {
    w[i] = _mm256_set1_epi8(static_cast<char>(i));
    sum[i] = _mm256_setzero_si256();
  }
  for (int64_t r = 0; r < rounds; r++) {
    __m256i part[kChains] = {};
#pragma GCC unroll 8
    for (int j = 0; j < kRun; j++) {
      asm volatile("" : "+x"(a));  // another vector each time, for all that the compiler knows
#pragma GCC unroll 4
      for (int i = 0; i < kChains; i++) part[i] = _mm256_add_epi16(part[i], _mm256_maddubs_epi16(w[i], a));
    }
#pragma GCC unroll 4
    for (int i = 0; i < kChains; i++) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(part[i], ones));
  }
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) _mm256_storeu_ps(sink + 8 * i, _mm256_castsi256_ps(sum[i]));
  return 2.0 * 32 * kChains * kRun * static_cast<double>(rounds);
}

double fp32(int64_t rounds, float* sink) {
  constexpr int kChains = 12;  // latency 4 or 5, two a cycle
  __m256 w = _mm256_setzero_ps(), a = _mm256_set1_ps(1), sum[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+x"(w), "+x"(a));
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) sum[i] = _mm256_fmadd_ps(w, a, sum[i]);
  }
  __m256 all = sum[0];
#pragma GCC unroll 12
  for (int i = 1; i < kChains; i++) all = _mm256_add_ps(all, sum[i]);
  _mm256_storeu_ps(sink, all);
  return 2.0 * 8 * kChains * static_cast<double>(rounds);
}

// There is no bf16 arithmetic: a pair is widened (shift, mask) and goes through two FMAs.
double bf16(int64_t rounds, float* sink) {
  constexpr int kRows = 5;  // that share one widened pair, as rows of a tile do
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256i w = _mm256_setzero_si256();
  __m256 a = _mm256_set1_ps(1), even[kRows], odd[kRows];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; i++) even[i] = odd[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+x"(w), "+x"(a));
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(w, high));
#pragma GCC unroll 5
    for (int i = 0; i < kRows; i++) {
      even[i] = _mm256_fmadd_ps(first, a, even[i]);
      odd[i] = _mm256_fmadd_ps(second, a, odd[i]);
    }
  }
  __m256 all = _mm256_setzero_ps();
#pragma GCC unroll 12
  for (int i = 0; i < kRows; i++) all = _mm256_add_ps(all, _mm256_add_ps(even[i], odd[i]));
  _mm256_storeu_ps(sink, all);
  return 2.0 * 8 * 2 * kRows * static_cast<double>(rounds);
}

const PeakKernels kTable = {int8, bf16, fp32};

}  // namespace
extern const PeakKernels* const kPeakKernels;
const PeakKernels* const kPeakKernels = &kTable;
}  // namespace twostep::avx2
