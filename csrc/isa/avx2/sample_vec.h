// What sampling needs beyond V; see isa/scalar/sample_vec.h for the meaning.
#pragma once
#include "isa/avx2/vec.h"
#include "isa/sample.h"

namespace twostep::avx2 {

// For each 8-bit mask: the positions of its set bits, one a byte.
struct PackTable {
  uint64_t lanes[256];
  constexpr PackTable() : lanes() {
    for (int mask = 0; mask < 256; mask++) {
      int count = 0;
      for (int i = 0; i < 8; i++) {
        if (mask >> i & 1) lanes[mask] |= static_cast<uint64_t>(i) << (8 * count++);
      }
    }
  }
};
inline constexpr PackTable kPack{};

struct S {
  class Broken {
   public:
    void see(V::F x) {
      any_ = _mm256_or_ps(any_, _mm256_cmp_ps(x, V::set1(__builtin_inff()), _CMP_NLT_UQ));
    }
    bool any() const { return _mm256_movemask_ps(any_) != 0; }

   private:
    V::F any_ = V::zero();
  };

  static V::F keep_bits(V::F a, uint32_t bits) {
    const V::I lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const V::I set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
    return _mm256_blendv_ps(V::set1(-__builtin_inff()), a, _mm256_castsi256_ps(set));
  }
  static V::F zero_below(V::F a, V::F v, V::F low) {
    return _mm256_and_ps(a, _mm256_cmp_ps(v, low, _CMP_GE_OQ));
  }
  static uint32_t at_least(V::F v, V::F low) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, low, _CMP_GE_OQ)));
  }

  static constexpr double kMagic = 1.5 * static_cast<double>(1ull << (52 - kWeightBits));
  static V::I magic_bits() { return _mm256_castpd_si256(_mm256_set1_pd(kMagic)); }
  static V::I low_weights(V::F e) {
    const __m256d d = _mm256_cvtps_pd(_mm256_castps256_ps128(e));
    return _mm256_castpd_si256(_mm256_add_pd(d, _mm256_set1_pd(kMagic)));
  }
  static V::I high_weights(V::F e) {
    const __m256d d = _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1));
    return _mm256_castpd_si256(_mm256_add_pd(d, _mm256_set1_pd(kMagic)));
  }
  class WeightSum {
   public:
    void add(V::F e) {
      low_ = _mm256_add_epi64(low_, low_weights(e));
      high_ = _mm256_add_epi64(high_, high_weights(e));
      vectors_++;
    }
    // The magic number's own bits come off once, for all: sums wrap around modulo 2^64.
    uint64_t total() const {
      uint64_t lanes[4], magic[4];
      _mm256_storeu_si256(reinterpret_cast<V::I*>(lanes), _mm256_add_epi64(low_, high_));
      _mm256_storeu_si256(reinterpret_cast<V::I*>(magic), magic_bits());
      return lanes[0] + lanes[1] + lanes[2] + lanes[3] - magic[0] * V::W * vectors_;
    }

   private:
    V::I low_ = _mm256_setzero_si256(), high_ = _mm256_setzero_si256();
    uint64_t vectors_ = 0;
  };
  static void store_int(int32_t* p, V::I a) { _mm256_storeu_si256(reinterpret_cast<V::I*>(p), a); }
  static void store_weights(uint64_t* q, V::F e) {
    auto* out = reinterpret_cast<V::I*>(q);
    _mm256_storeu_si256(out, _mm256_sub_epi64(low_weights(e), magic_bits()));
    _mm256_storeu_si256(out + 1, _mm256_sub_epi64(high_weights(e), magic_bits()));
  }
  static void store_chosen(float* values, int32_t* ids, V::F v, int first, uint32_t mask) {
    const V::I lanes = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kPack.lanes[mask])));
    _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(v, lanes));
    _mm256_storeu_si256(reinterpret_cast<V::I*>(ids), _mm256_add_epi32(lanes, _mm256_set1_epi32(first)));
  }
};

}  // namespace twostep::avx2
