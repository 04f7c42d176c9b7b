// What sampling needs beyond V; see isa/scalar/sample_vec.h for the meaning.
#pragma once
#include "isa/avx512/vec.h"
#include "isa/sample.h"

namespace twostep::avx512 {

struct S {
  class Broken {
   public:
    void see(V::F x) {
      any_ = static_cast<__mmask16>(any_ | _mm512_cmp_ps_mask(x, V::set1(__builtin_inff()), _CMP_NLT_UQ));
    }
    bool any() const { return any_ != 0; }

   private:
    __mmask16 any_ = 0;
  };

  static V::F keep_bits(V::F a, uint32_t bits) {
    return _mm512_mask_mov_ps(V::set1(-__builtin_inff()), static_cast<__mmask16>(bits), a);
  }
  static V::F zero_below(V::F a, V::F v, V::F low) {
    return _mm512_mask_mov_ps(V::zero(), _mm512_cmp_ps_mask(v, low, _CMP_GE_OQ), a);
  }
  static uint32_t at_least(V::F v, V::F low) {
    return static_cast<uint32_t>(_mm512_cmp_ps_mask(v, low, _CMP_GE_OQ));
  }

  static constexpr double kMagic = 1.5 * static_cast<double>(1ull << (52 - kWeightBits));
  static V::I magic_bits() { return _mm512_castpd_si512(_mm512_set1_pd(kMagic)); }
  static __m512d widen(__m256 e) {
#ifdef TWOSTEP_EMULATE_AVX512  // SIMDe 0.7 has no _mm512_cvtps_pd
    float narrow[8];
    double wide[8];
    _mm256_storeu_ps(narrow, e);
    for (int i = 0; i < 8; i++) wide[i] = static_cast<double>(narrow[i]);
    return _mm512_loadu_pd(wide);
#else
    return _mm512_cvtps_pd(e);
#endif
  }
  static V::I weights8(__m256 e) {
    return _mm512_castpd_si512(_mm512_add_pd(widen(e), _mm512_set1_pd(kMagic)));
  }
  static __m256 low_half(V::F e) { return _mm512_castps512_ps256(e); }
  static __m256 high_half(V::F e) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(e), 1));
  }
  class WeightSum {
   public:
    void add(V::F e) {
      low_ = _mm512_add_epi64(low_, weights8(low_half(e)));
      high_ = _mm512_add_epi64(high_, weights8(high_half(e)));
      vectors_++;
    }
    // The magic number's own bits come off once, for all: sums wrap around modulo 2^64.
    uint64_t total() const {
      uint64_t lanes[8], magic[8];
      _mm512_storeu_si512(lanes, _mm512_add_epi64(low_, high_));
      _mm512_storeu_si512(magic, magic_bits());
      uint64_t sum = 0;
      for (int i = 0; i < 8; i++) sum += lanes[i];
      return sum - magic[0] * V::W * vectors_;
    }

   private:
    V::I low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
    uint64_t vectors_ = 0;
  };
  static void store_int(int32_t* p, V::I a) { _mm512_storeu_si512(p, a); }
  static void store_weights(uint64_t* q, V::F e) {
    _mm512_storeu_si512(q, _mm512_sub_epi64(weights8(low_half(e)), magic_bits()));
    _mm512_storeu_si512(q + 8, _mm512_sub_epi64(weights8(high_half(e)), magic_bits()));
  }
  // Packed in a register: the compressing store is many times slower on Zen 4.
  static void store_chosen(float* values, int32_t* ids, V::F v, int first, uint32_t mask) {
    const auto m = static_cast<__mmask16>(mask);
    const V::I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(m, v));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  }
};

}  // namespace twostep::avx512
