// Kernels that sampling needs: passes over one row of logits [n], float32.
//
// Probabilities are integers here. The weight of a logit v in a row with maximum `max` is
//     weight(v) = round(2^40 * e^(v - max)),   0 when v < max - kNegligible
// so sums of weights are exact and the same in any order, on any number of threads and at any
// vector width. e^x is exp_approx of act.inc, which is built from correctly rounded operations and
// gives the same bits in every instruction set. 2^18 logits of weight 2^40 fit in 58 bits.
#pragma once
#include <cstdint>

namespace twostep {

// Passes keep the maximum of every block, so that later passes skip blocks with nothing of interest.
inline constexpr int kSampleBlock = 64;
inline constexpr int kWeightBits = 40;
// e^-29 * 2^40 = 0.28: rounds to a weight of 0.
inline constexpr float kNegligible = 29.0f;
// `collect` stores whole vectors: its outputs hold this many elements more than n.
inline constexpr int kCollectSlack = 16;

inline constexpr int sample_blocks(int n) { return (n + kSampleBlock - 1) / kSampleBlock; }

struct LogitScan {
  float max;
  bool broken;  // a NaN or +Inf among x
};

struct SampleKernels {
  // z[i] = x[i] * scale, or -Inf where `allowed` (bit i of its words, null: all) is clear. z may be
  // x or null (not written). block_max[b] = the largest z of block b.
  LogitScan (*scan)(const float* x, const uint32_t* allowed, float scale, int n, float* z,
                    float* block_max);
  // The sum of the weights of all z[i] >= lo; block_sum[b] = that of block b. lo >= max - kNegligible.
  uint64_t (*sum_weights)(const float* z, int n, float max, float lo, const float* block_max,
                          uint64_t* block_sum);
  // q[i] = weight(z[i])
  void (*weights)(const float* z, int n, float max, uint64_t* q);
  // Values and indices of all z[i] >= lo in order of i; returns how many.
  int (*collect)(const float* z, int n, float lo, const float* block_max, float* values, int32_t* ids);
  // bucket[i] = round((high - v[i]) * scale), at most `last`: never falls as v falls. Stores whole
  // vectors, like `collect`.
  void (*bucket)(const float* v, int n, float high, float scale, int last, int32_t* bucket);
  // How many z[i] >= lo.
  int (*count)(const float* z, int n, float lo, const float* block_max);
};

}  // namespace twostep
