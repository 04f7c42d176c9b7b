// ARMv8.2 NEON: eight floats in two registers. Two, because every byte and float of activations that
// is broadcast then serves eight outputs, and because the order of all sums is then AVX2's.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace twostep::neon {

struct V {
  static constexpr int W = 8;
  struct F {
    float32x4_t lo, hi;
  };
  struct I {
    int32x4_t lo, hi;
  };
  struct Mask {
    uint32x4_t lo, hi;
  };

  static F zero() { return set1(0.0f); }
  static F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  // There are no masked loads and stores: ends of rows go through a copy.
  static F load_n(const float* p, int n) {
    if (n == W) return load(p);
    float lanes[W] = {};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return load(lanes);
  }
  static void store(float* p, F a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
  }
  static void store_n(float* p, F a, int n) {
    if (n == W) return store(p, a);
    float lanes[W];
    store(lanes, a);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
  }
  static F load_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  }
  static F load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return as_floats({vshll_n_u16(vget_low_u16(h), 16), vshll_high_n_u16(h, 16)});
  }
  static void store_f16(uint16_t* p, F a) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi)));
  }
  static void store_bf16(uint16_t* p, F a) {
    vst1q_u16(p, vcombine_u16(to_bf16(a.lo), to_bf16(a.hi)));
  }
  static F add(F a, F b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
  static F sub(F a, F b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  static F div(F a, F b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
  static F fma(F a, F b, F c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
  // The second operand if either is NaN, as on x86; FMAX and FMIN would give the NaN.
  static F max(F a, F b) { return choose({vcgtq_f32(a.lo, b.lo), vcgtq_f32(a.hi, b.hi)}, a, b); }
  static F min(F a, F b) { return choose({vcltq_f32(a.lo, b.lo), vcltq_f32(a.hi, b.hi)}, a, b); }
  static F abs(F a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
  static F round(F a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
  // a * 2^n, n a whole number from -126 to 127
  static F scale(F a, F n) {
    const I i = to_int(n);
    const int32x4_t bias = vdupq_n_s32(127);
    return mul(a, {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i.lo, bias), 23)),
                   vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i.hi, bias), 23))});
  }
  static F keep_n(F a, F b, int n) { return choose(lanes_below(n), a, b); }
  static float reduce_add(F a) {
    const float32x4_t s = vaddq_f32(a.lo, a.hi);
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
  }
  static float reduce_max(F a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }
  // The larger of non-negative values by their bits: NaN > infinity > every number.
  static F max_bits(F a, F b) {
    return {vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(b.lo))),
            vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.hi), vreinterpretq_s32_f32(b.hi)))};
  }
  static float reduce_max_bits(F a) {
    const int32_t most =
        vmaxvq_s32(vmaxq_s32(vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi)));
    float f;
    std::memcpy(&f, &most, 4);
    return f;
  }
  static I to_int(F a) { return {vcvtnq_s32_f32(a.lo), vcvtnq_s32_f32(a.hi)}; }
  static F to_float(I a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }
  static I add_i(I a, I b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
  static int32_t reduce_add_i(I a) { return vaddvq_s32(vaddq_s32(a.lo, a.hi)); }
  static void store_i8(int8_t* p, I a) {
    vst1_s8(p, vmovn_s16(vmovn_high_s32(vmovn_s32(a.lo), a.hi)));
  }

  static F as_floats(Mask a) { return {vreinterpretq_f32_u32(a.lo), vreinterpretq_f32_u32(a.hi)}; }
  static F choose(Mask which, F a, F b) {
    return {vbslq_f32(which.lo, a.lo, b.lo), vbslq_f32(which.hi, a.hi, b.hi)};
  }
  static Mask lanes_below(int n) {
    static constexpr int32_t kLanes[W] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t end = vdupq_n_s32(n);
    return {vcltq_s32(vld1q_s32(kLanes), end), vcltq_s32(vld1q_s32(kLanes + 4), end)};
  }

 private:
  static uint16x4_t to_bf16(float32x4_t a) {
    const uint32x4_t u = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
  }
};

}  // namespace twostep::neon
