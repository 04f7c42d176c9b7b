// The arithmetic of matrix products alone, in registers: what no kernel can exceed.
#pragma once
#include <cstdint>

namespace twostep {

struct PeakKernels {
  // Each runs its loop `rounds` times, on independent chains that hide the latency, and returns the
  // operations done; a multiplication and an addition are two. `sink` [64] takes the results, so
  // that the compiler cannot leave them out.
  double (*int8)(int64_t rounds, float* sink);
  double (*bf16)(int64_t rounds, float* sink);
  double (*fp32)(int64_t rounds, float* sink);
};

}  // namespace twostep
