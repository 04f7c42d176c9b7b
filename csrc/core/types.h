// Number formats and small conversions. No intrinsics here: this header is included by every
// translation unit, whatever instruction set it is compiled for.
#pragma once
#include <cstdint>
#include <cstring>

namespace twostep {

// How a weight lies in its file.
enum class Format : uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// How an activation lies in memory for `linear` to read (see act.h).
enum class ActForm : uint8_t { Q8, BF16, F32 };
inline constexpr int kNumActForms = 3;

enum class KVType : uint8_t { BF16, F16, F32 };

inline float bf16_to_f32(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 0x1fu;
  uint32_t man = h & 0x3ffu;
  uint32_t u;
  if (exp == 0x1f) {
    u = sign | 0x7f800000u | (man << 13);
  } else if (exp != 0) {
    u = sign | ((exp + 112) << 23) | (man << 13);
  } else {  // zero or subnormal: man * 2^-24
    float f = static_cast<float>(man) * 5.9604644775390625e-8f;
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even, as F16C does.
inline uint16_t f32_to_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // overflow to infinity
  if (u < 0x38800000u) {  // subnormal half: let the FPU round by adding 0.5
    float a;
    std::memcpy(&a, &u, 4);
    a += 0.5f;
    std::memcpy(&u, &a, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000u));
  }
  const uint32_t odd = (u >> 13) & 1;
  u += 0xc8000fffu + odd;
  return static_cast<uint16_t>(sign | (u >> 13));
}

}  // namespace twostep
