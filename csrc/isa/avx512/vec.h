// AVX-512 F/BW/VL + VNNI + BF16: sixteen floats.
#pragma once
#ifdef TWOSTEP_EMULATE_AVX512
#include "isa/avx512/emulate.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace twostep::avx512 {

struct V {
  static constexpr int W = 16;
  using F = __m512;
  using I = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static __mmask16 lanes_below(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), a); }
  static F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static void store_f16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // To nearest even; numbers below 2^-126 become zeros, which is what vdpbf16ps takes them for.
  static __m256i to_bf16(F a) {
#ifdef TWOSTEP_EMULATE_AVX512
    const I u = _mm512_castps_si512(a);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    I r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const I quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(r);
#else
    return (__m256i)_mm512_cvtneps_pbh(a);
#endif
  }
  static void store_bf16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // a * 2^n, n a whole number from -126 to 127
  static F scale(F a, F n) { return _mm512_scalef_ps(a, n); }
  static F keep_n(F a, F b, int n) { return _mm512_mask_mov_ps(b, lanes_below(n), a); }
  static float reduce_add(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  static float reduce_max(F a) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  // The larger of non-negative values by their bits: NaN > infinity > every number.
  static F max_bits(F a, F b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  static float reduce_max_bits(F a) {
    const I u = _mm512_castps_si512(a);
    const __m256i h = _mm256_max_epi32(_mm512_castsi512_si256(u), _mm512_extracti64x4_epi64(u, 1));
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(s));
  }
  static I to_int(F a) { return _mm512_cvtps_epi32(a); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  static int32_t reduce_add_i(I a) {
    const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static void store_i8(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
};

}  // namespace twostep::avx512
