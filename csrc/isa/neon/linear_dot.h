// Byte dot products of NEON: SDOT takes signed bytes by signed bytes, and the four activations that
// all outputs share are a lane of its last operand, so nothing is broadcast. The integers of every
// kind fit in a signed byte.
#pragma once
#include "isa/linear.h"
#include "isa/neon/vec.h"

namespace twostep::neon {

struct Dot {
  struct B {
    uint8x16_t lo, hi;
  };
  static constexpr int kRowsAtOnce = 1;
  static constexpr int kMaxRows = 16;

  static B load(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
  static V::I set1_i(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static V::I sub(V::I a, V::I b) { return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)}; }
  template <int n>
  static V::I shift_left(V::I a) {
    return {vshlq_n_s32(a.lo, n), vshlq_n_s32(a.hi, n)};
  }

  template <Kind K>
  static void unpack(const uint8_t* values, B* w) {
    static_assert(info(K).max_value <= 127, "SDOT reads signed bytes");
    if constexpr (info(K).bits == 4) {
      const uint8x16_t nibble = vdupq_n_u8(15);
      for (int j = 0; j < 4; j++) {
        const B x = load(values + j * 32);
        w[j] = {vandq_u8(x.lo, nibble), vandq_u8(x.hi, nibble)};
        w[j + 4] = {vshrq_n_u8(x.lo, 4), vshrq_n_u8(x.hi, 4)};
      }
    } else {
      for (int j = 0; j < 8; j++) w[j] = load(values + j * 32);
    }
  }

  template <Kind K, int first, int count, int S>
  static void dot(const B* w, const uint8_t*, const int8_t* a, V::I* x) {
    for (int s = 0; s < S; s++) {
      if constexpr (first == 0) dot_quarters(w, vld1q_s8(a + s * kGroup), x[s]);
      if constexpr (first + count == 8) dot_quarters(w + 4, vld1q_s8(a + s * kGroup + 16), x[s]);
    }
  }

  // Not measured on hardware: left to its own prefetchers.
  template <size_t bytes, bool few_rows>
  static void prefetch(const uint8_t*) {}

  // V::W bytes, as float.
  static V::F bytes(const uint8_t* p) {
    const uint16x8_t x = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_high_u16(x))};
  }
  static V::F signed_bytes(const uint8_t* p) {
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
  }
  // `count` bits from bit `shift` of each lane, as float.
  template <int shift, int count>
  static V::F bits(B x) {
    return {bits_of<shift, count>(x.lo), bits_of<shift, count>(x.hi)};
  }
  // Byte b of each lane, signed, as float.
  template <int b>
  static V::F signed_byte(B x) {
    return {signed_byte_of<b>(x.lo), signed_byte_of<b>(x.hi)};
  }
  // The first or second value of each pair of bf16.
  template <int second>
  static V::F bf16_of_pair(const uint8_t* p) {
    const B x = load(p);
    return {bf16_of<second>(x.lo), bf16_of<second>(x.hi)};
  }

 private:
  // x += w[0 .. 3] . the four quarters of `a`
  static void dot_quarters(const B* w, int8x16_t a, V::I& x) {
    dot_quarter<0>(w[0], a, x);
    dot_quarter<1>(w[1], a, x);
    dot_quarter<2>(w[2], a, x);
    dot_quarter<3>(w[3], a, x);
  }
  template <int lane>
  static void dot_quarter(B w, int8x16_t a, V::I& x) {
    x.lo = vdotq_laneq_s32(x.lo, vreinterpretq_s8_u8(w.lo), a, lane);
    x.hi = vdotq_laneq_s32(x.hi, vreinterpretq_s8_u8(w.hi), a, lane);
  }

  template <int shift, int count>
  static float32x4_t bits_of(uint8x16_t x) {
    uint32x4_t u = vreinterpretq_u32_u8(x);
    if constexpr (shift > 0) u = vshrq_n_u32(u, shift);
    if constexpr (shift + count < 32) u = vandq_u32(u, vdupq_n_u32((1u << count) - 1));
    return vcvtq_f32_u32(u);
  }
  template <int b>
  static float32x4_t signed_byte_of(uint8x16_t x) {
    int32x4_t i = vreinterpretq_s32_u8(x);
    if constexpr (b < 3) i = vshlq_n_s32(i, 24 - 8 * b);
    return vcvtq_f32_s32(vshrq_n_s32(i, 24));
  }
  template <int second>
  static float32x4_t bf16_of(uint8x16_t x) {
    const uint32x4_t u = vreinterpretq_u32_u8(x);
    return vreinterpretq_f32_u32(second ? vandq_u32(u, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(u, 16));
  }
};

}  // namespace twostep::neon
