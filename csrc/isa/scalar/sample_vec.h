// What sampling needs beyond V, in plain C++.
#pragma once
#include "isa/sample.h"
#include "isa/scalar/vec.h"

namespace twostep::scalar {

struct S {
  // Remembers whether any vector held a NaN or +Inf.
  class Broken {
   public:
    void see(V::F x) {
      for (int i = 0; i < V::W; i++) any_ |= !(x.v[i] < __builtin_inff());
    }
    bool any() const { return any_; }

   private:
    bool any_ = false;
  };

  // Lane i keeps a if bit i is set, else -Inf.
  static V::F keep_bits(V::F a, uint32_t bits) {
    for (int i = 0; i < V::W; i++) a.v[i] = bits >> i & 1 ? a.v[i] : -__builtin_inff();
    return a;
  }
  // a where v >= low, else 0
  static V::F zero_below(V::F a, V::F v, V::F low) {
    for (int i = 0; i < V::W; i++) a.v[i] = v.v[i] >= low.v[i] ? a.v[i] : 0.0f;
    return a;
  }
  // Bit i: v >= low
  static uint32_t at_least(V::F v, V::F low) {
    uint32_t bits = 0;
    for (int i = 0; i < V::W; i++) bits |= static_cast<uint32_t>(v.v[i] >= low.v[i]) << i;
    return bits;
  }

  // round(e * 2^kWeightBits) for 0 <= e <= 1: adding kMagic leaves it in the low bits of the double.
  static constexpr double kMagic = 1.5 * static_cast<double>(1ull << (52 - kWeightBits));
  static uint64_t bits(double d) {
    uint64_t u;
    std::memcpy(&u, &d, 8);
    return u;
  }
  static uint64_t weight(float e) { return bits(static_cast<double>(e) + kMagic) - bits(kMagic); }
  class WeightSum {
   public:
    void add(V::F e) {
      for (int i = 0; i < V::W; i++) sum_ += weight(e.v[i]);
    }
    uint64_t total() const { return sum_; }

   private:
    uint64_t sum_ = 0;
  };
  static void store_int(int32_t* p, V::I a) { std::memcpy(p, a.v, sizeof(a.v)); }
  static void store_weights(uint64_t* q, V::F e) {
    for (int i = 0; i < V::W; i++) q[i] = weight(e.v[i]);
  }
  // The lanes of `mask`, packed; their indices count from `first`. May write W elements.
  static void store_chosen(float* values, int32_t* ids, V::F v, int first, uint32_t mask) {
    for (; mask; mask &= mask - 1) {
      const int i = __builtin_ctz(mask);
      *values++ = v.v[i];
      *ids++ = first + i;
    }
  }
};

}  // namespace twostep::scalar
