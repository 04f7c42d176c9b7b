// Byte dot products of AVX-512 VNNI, and the bf16 ones of AVX-512 BF16.
#pragma once
#include "isa/avx512/vec.h"
#include "isa/linear.h"

namespace twostep::avx512 {

struct Dot {
  using B = __m512i;
  // vpdpbusd takes four cycles: four rows keep it busy.
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kPairRows = 6;  // of two panels: 12 integer and 12 float sums
#ifdef TWOSTEP_EMULATE_AVX512
  static constexpr int kMaxRows = 6, kFloatRows = 3;  // the compiler takes minutes for more
#else
  static constexpr int kMaxRows = 16;
  static constexpr int kFloatRows = 12;  // 2 * 12 accumulators leave eight registers for weights
#endif

  static B load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static V::I set1_i(int32_t x) { return _mm512_set1_epi32(x); }
  static V::I sub(V::I a, V::I b) { return _mm512_sub_epi32(a, b); }
  template <int n>
  static V::I shift_left(V::I a) {
    return _mm512_slli_epi32(a, n);
  }
  static int32_t four_bytes(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return x;
  }

  // The low or high nibbles of all bytes.
  static B nibbles(B x, bool high) {
    return _mm512_and_si512(high ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
  }

  template <Kind K>
  static void unpack(const uint8_t* values, B* w) {
    if constexpr (info(K).bits == 4) {
      const B nibble = _mm512_set1_epi8(15);
      for (int j = 0; j < 4; j++) {
        const B x = load(values + j * 64);
        w[j] = _mm512_and_si512(x, nibble);
        w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
      }
    } else {
      for (int j = 0; j < 8; j++) w[j] = load(values + j * 64);
    }
  }

  // Rows innermost: their chains are independent.
  template <Kind K, int first, int count, int S>
  static void dot(const B* w, const uint8_t*, const int8_t* a, V::I* x) {
#pragma GCC unroll 8
    for (int j = first; j < first + count; j++) {
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        x[s] = _mm512_dpbusd_epi32(x[s], w[j], _mm512_set1_epi32(four_bytes(a + s * kGroup + 4 * j)));
      }
    }
  }

  // A page ahead. With many rows into the L2 cache, for hints for the L1 hold up loads. (Zen 4:
  // BF16 at 8, 12 and 16 rows 382, 422 and 403 GOPS instead of 246, 254 and 312 with hints for the L1.)
  template <size_t bytes, bool few_rows>
  static void prefetch(const uint8_t* values) {
    constexpr auto kHint = few_rows ? _MM_HINT_T0 : _MM_HINT_T1;
#pragma GCC unroll 9
    for (size_t i = 0; i < bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(values) + 4096 + i, kHint);
    }
  }

  // V::W bytes, as float.
  static V::F bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static V::F signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // `count` bits from bit `shift` of each lane, as float.
  template <int shift, int count>
  static V::F bits(B x) {
    if constexpr (shift > 0) x = _mm512_srli_epi32(x, shift);
    if constexpr (shift + count < 32) x = _mm512_and_si512(x, _mm512_set1_epi32((1 << count) - 1));
    return _mm512_cvtepi32_ps(x);
  }
  // Byte b of each lane, signed, as float.
  template <int b>
  static V::F signed_byte(B x) {
    if constexpr (b < 3) x = _mm512_slli_epi32(x, 24 - 8 * b);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24));
  }
  // The first or second value of each pair of bf16.
  template <int second>
  static V::F bf16_of_pair(const uint8_t* p) {
    const B x = load(p);
    return _mm512_castsi512_ps(second ? _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                      : _mm512_slli_epi32(x, 16));
  }

  static B pair_of_bf16(const uint16_t* a) { return _mm512_set1_epi32(four_bytes(a)); }
  // acc + the pairs' products with one pair of activations.
  static V::F dot_bf16(V::F acc, B w, B pair) { return _mm512_dpbf16_ps(acc, as_bf16(w), as_bf16(pair)); }
  static __m512bh as_bf16(B x) {
    __m512bh h;
    std::memcpy(&h, &x, sizeof h);
    return h;
  }
};

}  // namespace twostep::avx512
