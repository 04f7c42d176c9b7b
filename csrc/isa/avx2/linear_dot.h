// Byte dot products of AVX2: vpmaddubsw (unsigned weights times signed activations, pairs added in
// int16), collected in int16 for as long as nothing can overflow, then vpmaddwd to int32.
#pragma once
#include "isa/avx2/vec.h"
#include "isa/linear.h"

namespace twostep::avx2 {

struct Dot {
  using B = __m256i;
  static constexpr int kRowsAtOnce = 1;
  static constexpr int kMaxRows = 16;

  static B load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const B*>(p)); }
  static V::I set1_i(int32_t x) { return _mm256_set1_epi32(x); }
  static V::I sub(V::I a, V::I b) { return _mm256_sub_epi32(a, b); }
  template <int n>
  static V::I shift_left(V::I a) {
    return _mm256_slli_epi32(a, n);
  }
  // Bytes of the activations for k = 4j .. 4j + 3, in every lane.
  static B broadcast(const int8_t* a) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(a)));
  }

  // S8 keeps magnitudes in registers (128 fits an unsigned byte); `dot` reads the signs from memory.
  template <Kind K>
  static void unpack(const uint8_t* values, B* w) {
    const B nibble = _mm256_set1_epi8(15);
    if constexpr (info(K).bits == 4) {
      for (int j = 0; j < 4; j++) {
        const B x = load(values + j * 32);
        w[j] = _mm256_and_si256(x, nibble);
        w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
      }
    } else {
      for (int j = 0; j < 8; j++) {
        const B x = load(values + j * 32);
        w[j] = K == Kind::S8 ? _mm256_abs_epi8(x) : x;
      }
    }
  }

  template <Kind K, int first, int count, int S>
  static void dot(const B* w, const uint8_t* values, const int8_t* a, V::I* x) {
    // 2 * 127 * max_value in each product: how many of them an int16 can hold.
    constexpr int kRun = K == Kind::S8 ? 1 : 32767 / (254 * info(K).max_value);
    const B ones = _mm256_set1_epi16(1);
    for (int s = 0; s < S; s++) {
      for (int j = first; j < first + count; j += kRun) {
        B sum = product<K>(w, values, a + s * kGroup, j);
        for (int i = 1; i < kRun && j + i < first + count; i++) {
          sum = _mm256_add_epi16(sum, product<K>(w, values, a + s * kGroup, j + i));
        }
        x[s] = _mm256_add_epi32(x[s], _mm256_madd_epi16(sum, ones));
      }
    }
  }

  template <Kind K>
  static B product(const B* w, const uint8_t* values, const int8_t* a, int j) {
    const B bytes = broadcast(a + 4 * j);
    if constexpr (K == Kind::S8) {
      return _mm256_maddubs_epi16(w[j], _mm256_sign_epi8(bytes, load(values + j * 32)));
    }
    return _mm256_maddubs_epi16(w[j], bytes);
  }

  template <size_t bytes, bool few_rows>
  static void prefetch(const uint8_t* values) {
    for (size_t i = 0; i < bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(values) + 2048 + i, _MM_HINT_T0);
    }
  }

  // V::W bytes, as float.
  static V::F bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static V::F signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // `count` bits from bit `shift` of each lane, as float.
  template <int shift, int count>
  static V::F bits(B x) {
    if constexpr (shift > 0) x = _mm256_srli_epi32(x, shift);
    if constexpr (shift + count < 32) x = _mm256_and_si256(x, _mm256_set1_epi32((1 << count) - 1));
    return _mm256_cvtepi32_ps(x);
  }
  // Byte b of each lane, signed, as float.
  template <int b>
  static V::F signed_byte(B x) {
    if constexpr (b < 3) x = _mm256_slli_epi32(x, 24 - 8 * b);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 24));
  }
  // The first or second value of each pair of bf16.
  template <int second>
  static V::F bf16_of_pair(const uint8_t* p) {
    const B x = load(p);
    return _mm256_castsi256_ps(second ? _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))
                                      : _mm256_slli_epi32(x, 16));
  }
};

}  // namespace twostep::avx2
