// AVX2 + FMA + F16C: eight floats.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace twostep::avx2 {

struct V {
  static constexpr int W = 8;
  using F = __m256;
  using I = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static I lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static void store_n(float* p, F a, int n) { _mm256_maskstore_ps(p, lanes_below(n), a); }
  static F load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static void store_f16(uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_bf16(uint16_t* p, F a) {
    const I u = _mm256_castps_si256(a);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    I r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const I quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, quiet, nan);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n, n a whole number from -126 to 127
  static F scale(F a, F n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static F keep_n(F a, F b, int n) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(lanes_below(n)));
  }
  static float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  static float reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  // The larger of non-negative values by their bits: NaN > infinity > every number.
  static F max_bits(F a, F b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static float reduce_max_bits(F a) {
    const I u = _mm256_castps_si256(a);
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(s));
  }
  static I to_int(F a) { return _mm256_cvtps_epi32(a); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
  static int32_t reduce_add_i(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static void store_i8(int8_t* p, I a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
};

}  // namespace twostep::avx2
