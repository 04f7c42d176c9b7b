// AVX-512 in plain C, for test builds on machines without it: SIMDe, and what SIMDe lacks.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

namespace twostep::emulate {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
struct Shorts {
  __m128i low, high;
};

template <class T>
struct Lanes {
  T v[16];
};

inline __m512 maskz_loadu_ps(__mmask16 mask, const float* p) {
  Lanes<float> r{};
  for (int i = 0; i < 16; i++) {
    if (mask >> i & 1) r.v[i] = p[i];
  }
  return bits<__m512>(r);
}
inline void mask_storeu_ps(float* p, __mmask16 mask, __m512 a) {
  const auto x = bits<Lanes<float>>(a);
  for (int i = 0; i < 16; i++) {
    if (mask >> i & 1) p[i] = x.v[i];
  }
}
inline __m512 cvtph_ps(__m256i a) {
  const auto x = bits<Shorts>(a);
  return bits<__m512>(Floats{_mm256_cvtph_ps(x.low), _mm256_cvtph_ps(x.high)});
}
inline __m256i cvtps_ph(__m512 a) {
  const auto x = bits<Floats>(a);
  return bits<__m256i>(Shorts{_mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT),
                                       _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT)});
}
inline __m256i cvtepi32_epi16(__m512i a) {
  const auto x = bits<Lanes<int32_t>>(a);
  Lanes<int16_t> r;
  for (int i = 0; i < 16; i++) r.v[i] = static_cast<int16_t>(x.v[i]);
  return bits<__m256i>(r);
}
inline __m128i cvtepi32_epi8(__m512i a) {
  const auto x = bits<Lanes<int32_t>>(a);
  Lanes<int8_t> r;
  for (int i = 0; i < 16; i++) r.v[i] = static_cast<int8_t>(x.v[i]);
  return bits<__m128i>(r);
}
inline __m512i cvtepu16_epi32(__m256i a) {
  const auto x = bits<Shorts>(a);
  return bits<__m512i>(Ints{_mm256_cvtepu16_epi32(x.low), _mm256_cvtepu16_epi32(x.high)});
}
inline __m512i cvtepu8_epi32(__m128i a) {
  return bits<__m512i>(Ints{_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))});
}
inline __m512i cvtepi8_epi32(__m128i a) {
  return bits<__m512i>(Ints{_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))});
}
inline __m512i cvtps_epi32(__m512 a) {
  const auto x = bits<Floats>(a);
  return bits<__m512i>(Ints{_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)});
}
inline __m512 cvtepi32_ps(__m512i a) {
  const auto x = bits<Ints>(a);
  return bits<__m512>(Floats{_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)});
}
template <int kControl>
inline __m512 permute_ps(__m512 a) {
  const auto x = bits<Floats>(a);
  return bits<__m512>(
      Floats{_mm256_permute_ps(x.low, kControl), _mm256_permute_ps(x.high, kControl)});
}

}  // namespace twostep::emulate

#define _mm512_maskz_loadu_ps(mask, p) twostep::emulate::maskz_loadu_ps(mask, p)
#define _mm512_mask_storeu_ps(p, mask, a) twostep::emulate::mask_storeu_ps(p, mask, a)
#define _mm512_cvtph_ps(a) twostep::emulate::cvtph_ps(a)
#define _mm512_cvtps_ph(a, rounding) twostep::emulate::cvtps_ph(a)  // to nearest even only
#define _mm512_cvtepi32_epi16(a) twostep::emulate::cvtepi32_epi16(a)
#define _mm512_cvtepi32_epi8(a) twostep::emulate::cvtepi32_epi8(a)
#define _mm512_cvtepu16_epi32(a) twostep::emulate::cvtepu16_epi32(a)
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepu8_epi32(a) twostep::emulate::cvtepu8_epi32(a)
#define _mm512_cvtepi8_epi32(a) twostep::emulate::cvtepi8_epi32(a)
#define _mm512_cvtps_epi32(a) twostep::emulate::cvtps_epi32(a)
#define _mm512_cvtepi32_ps(a) twostep::emulate::cvtepi32_ps(a)
#define _mm512_permute_ps(a, control) twostep::emulate::permute_ps<control>(a)
