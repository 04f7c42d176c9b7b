// Byte dot products in plain C++.
#pragma once
#include "isa/linear.h"
#include "isa/scalar/vec.h"

namespace twostep::scalar {

struct Dot {
  struct B {
    uint8_t v[V::W * 4];
  };
  static constexpr int kRowsAtOnce = 1;
  static constexpr int kMaxRows = 16;

  static B load(const uint8_t* p) {
    B b;
    std::memcpy(b.v, p, sizeof b.v);
    return b;
  }
  static V::I set1_i(int32_t x) {
    V::I r;
    for (int i = 0; i < V::W; i++) r.v[i] = x;
    return r;
  }
  static V::I sub(V::I a, V::I b) {
    for (int i = 0; i < V::W; i++) a.v[i] -= b.v[i];
    return a;
  }
  template <int n>
  static V::I shift_left(V::I a) {
    for (int i = 0; i < V::W; i++) a.v[i] *= 1 << n;
    return a;
  }

  template <Kind K>
  static void unpack(const uint8_t* values, B* w) {
    constexpr int kVectors = info(K).bits;  // 4 or 8
    for (int j = 0; j < kVectors; j++) {
      w[j] = load(values + j * V::W * 4);
      if constexpr (info(K).bits == 4) {
        for (int i = 0; i < V::W * 4; i++) {
          w[j + 4].v[i] = w[j].v[i] >> 4;
          w[j].v[i] &= 15;
        }
      }
    }
  }

  template <Kind K, int first, int count, int S>
  static void dot(const B* w, const uint8_t*, const int8_t* a, V::I* x) {
    for (int s = 0; s < S; s++) {
      for (int j = first; j < first + count; j++) {
        for (int n = 0; n < V::W; n++) {
          for (int b = 0; b < 4; b++) x[s].v[n] += w[j].v[n * 4 + b] * a[s * kGroup + 4 * j + b];
        }
      }
    }
  }

  template <size_t bytes, bool few_rows>
  static void prefetch(const uint8_t*) {}

  static V::F bytes(const uint8_t* p) {
    V::F r;
    for (int i = 0; i < V::W; i++) r.v[i] = static_cast<float>(p[i]);
    return r;
  }
  static V::F signed_bytes(const uint8_t* p) {
    V::F r;
    for (int i = 0; i < V::W; i++) r.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
    return r;
  }
  template <int shift, int count>
  static V::F bits(B x) {
    V::F r;
    for (int i = 0; i < V::W; i++) {
      r.v[i] = static_cast<float>(x.v[i * 4 + shift / 8] >> shift % 8 & ((1 << count) - 1));
    }
    return r;
  }
  template <int b>
  static V::F signed_byte(B x) {
    V::F r;
    for (int i = 0; i < V::W; i++) r.v[i] = static_cast<float>(static_cast<int8_t>(x.v[i * 4 + b]));
    return r;
  }
  template <int second>
  static V::F bf16_of_pair(const uint8_t* p) {
    V::F r;
    for (int i = 0; i < V::W; i++) {
      uint16_t h;
      std::memcpy(&h, p + i * 4 + second * 2, 2);
      r.v[i] = bf16_to_f32(h);
    }
    return r;
  }
};

}  // namespace twostep::scalar
