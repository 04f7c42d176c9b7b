// What sampling needs beyond V; see isa/scalar/sample_vec.h for the meaning.
#pragma once
#include "isa/neon/vec.h"
#include "isa/sample.h"

namespace twostep::neon {

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
      const float32x4_t limit = vdupq_n_f32(__builtin_inff());
      fine_ = vandq_u32(fine_, vandq_u32(vcltq_f32(x.lo, limit), vcltq_f32(x.hi, limit)));
    }
    bool any() const { return vminvq_u32(fine_) == 0; }

   private:
    uint32x4_t fine_ = vdupq_n_u32(~0u);
  };

  // Bit i in lane i.
  static V::Mask lane_bits() {
    static constexpr uint32_t kBits[V::W] = {1, 2, 4, 8, 16, 32, 64, 128};
    return {vld1q_u32(kBits), vld1q_u32(kBits + 4)};
  }
  static V::F keep_bits(V::F a, uint32_t bits) {
    const uint32x4_t all = vdupq_n_u32(bits);
    const V::Mask lane = lane_bits();
    return V::choose({vtstq_u32(all, lane.lo), vtstq_u32(all, lane.hi)}, a,
                     V::set1(-__builtin_inff()));
  }
  static V::F zero_below(V::F a, V::F v, V::F low) {
    return V::choose({vcgeq_f32(v.lo, low.lo), vcgeq_f32(v.hi, low.hi)}, a, V::zero());
  }
  static uint32_t at_least(V::F v, V::F low) {
    const V::Mask lane = lane_bits();
    return vaddvq_u32(vorrq_u32(vandq_u32(vcgeq_f32(v.lo, low.lo), lane.lo),
                                vandq_u32(vcgeq_f32(v.hi, low.hi), lane.hi)));
  }

  static constexpr double kMagic = 1.5 * static_cast<double>(1ull << (52 - kWeightBits));
  static uint64x2_t magic_bits() { return vreinterpretq_u64_f64(vdupq_n_f64(kMagic)); }
  // The weights of two lanes, plus magic_bits().
  static uint64x2_t weights(float64x2_t e) {
    return vreinterpretq_u64_f64(vaddq_f64(e, vdupq_n_f64(kMagic)));
  }
  static uint64x2_t low_weights(float32x4_t e) { return weights(vcvt_f64_f32(vget_low_f32(e))); }
  static uint64x2_t high_weights(float32x4_t e) { return weights(vcvt_high_f64_f32(e)); }

  class WeightSum {
   public:
    void add(V::F e) {
      low_ = vaddq_u64(low_, vaddq_u64(low_weights(e.lo), low_weights(e.hi)));
      high_ = vaddq_u64(high_, vaddq_u64(high_weights(e.lo), high_weights(e.hi)));
      vectors_++;
    }
    // The magic number's own bits come off once, for all: sums wrap around modulo 2^64.
    uint64_t total() const {
      return vaddvq_u64(vaddq_u64(low_, high_)) - vgetq_lane_u64(magic_bits(), 0) * V::W * vectors_;
    }

   private:
    uint64x2_t low_ = vdupq_n_u64(0), high_ = vdupq_n_u64(0);
    uint64_t vectors_ = 0;
  };
  static void store_int(int32_t* p, V::I a) {
    vst1q_s32(p, a.lo);
    vst1q_s32(p + 4, a.hi);
  }
  static void store_weights(uint64_t* q, V::F e) {
    vst1q_u64(q, vsubq_u64(low_weights(e.lo), magic_bits()));
    vst1q_u64(q + 2, vsubq_u64(high_weights(e.lo), magic_bits()));
    vst1q_u64(q + 4, vsubq_u64(low_weights(e.hi), magic_bits()));
    vst1q_u64(q + 6, vsubq_u64(high_weights(e.hi), magic_bits()));
  }
  static void store_chosen(float* values, int32_t* ids, V::F v, int first, uint32_t mask) {
    const uint16x8_t lanes = vmovl_u8(vcreate_u8(kPack.lanes[mask]));
    const uint32x4_t low = vmovl_u16(vget_low_u16(lanes)), high = vmovl_high_u16(lanes);
    const uint8x16x2_t from{{vreinterpretq_u8_f32(v.lo), vreinterpretq_u8_f32(v.hi)}};
    V::store(values, {vreinterpretq_f32_u8(vqtbl2q_u8(from, bytes_of(low))),
                      vreinterpretq_f32_u8(vqtbl2q_u8(from, bytes_of(high)))});
    const int32x4_t start = vdupq_n_s32(first);
    store_int(ids, {vaddq_s32(vreinterpretq_s32_u32(low), start),
                    vaddq_s32(vreinterpretq_s32_u32(high), start)});
  }

 private:
  // Where the four bytes of each lane lie: 4 * lane + 0, 1, 2, 3.
  static uint8x16_t bytes_of(uint32x4_t lane) {
    return vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100u), lane, 0x04040404u));
  }
};

}  // namespace twostep::neon
