#include "isa/peak.h"

#include "core/types.h"

namespace twostep::scalar {
namespace {

constexpr int kLanes = 32;  // enough independent chains for any compiler's vectors

double int8(int64_t rounds, float* sink) {
  uint8_t w[kLanes] = {};
  int8_t a[kLanes] = {};
  int32_t sum[kLanes] = {};
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));  // other numbers each time, for all the compiler knows
    for (int i = 0; i < kLanes; i++) sum[i] += w[i] * a[i];
  }
  for (int i = 0; i < kLanes; i++) sink[i] = static_cast<float>(sum[i]);
  return 2.0 * kLanes * static_cast<double>(rounds);
}

double bf16(int64_t rounds, float* sink) {
  uint16_t w[kLanes] = {};
  float a[kLanes] = {}, sum[kLanes] = {};
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));
    for (int i = 0; i < kLanes; i++) sum[i] += bf16_to_f32(w[i]) * a[i];
  }
  for (int i = 0; i < kLanes; i++) sink[i] = sum[i];
  return 2.0 * kLanes * static_cast<double>(rounds);
}

double fp32(int64_t rounds, float* sink) {
  float w[kLanes] = {}, a[kLanes] = {}, sum[kLanes] = {};
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+m"(w), "+m"(a));
    for (int i = 0; i < kLanes; i++) sum[i] += w[i] * a[i];
  }
  for (int i = 0; i < kLanes; i++) sink[i] = sum[i];
  return 2.0 * kLanes * static_cast<double>(rounds);
}

const PeakKernels kTable = {int8, bf16, fp32};

}  // namespace
extern const PeakKernels* const kPeakKernels;
const PeakKernels* const kPeakKernels = &kTable;
}  // namespace twostep::scalar
