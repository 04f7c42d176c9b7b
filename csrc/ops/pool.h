// Pooling: one vector for each of the step's logits rows, which is what an embedding is made of.
#pragma once
#include <memory>
#include <vector>

#include "isa/kernels.h"
#include "plan/plan.h"

namespace twostep {

// The vectors of one step, for the host; valid once the launch is complete.
struct PooledStep {
  int width;
  std::vector<float> values;  // [S, width]

  PooledStep(const Step& step, int width_)
      : width(width_), values(static_cast<size_t>(step.num_logits) * width_) {}
  float* row(int s) { return values.data() + static_cast<size_t>(s) * width; }
};

// Vector s is row s of `x`.
std::unique_ptr<Op> make_pool_rows(std::shared_ptr<Rows> x);

// Vector s is the mean of all rows of its request, x of earlier steps included: a request that starts
// at position 0 starts its sum anew. `sums` [permanent rows, width] keeps the sums between steps. Rows
// are added one by one in order of position, so that no cut of a text changes the mean.
std::unique_ptr<Op> make_pool_mean(const KernelTable&, std::shared_ptr<Rows> x, std::shared_ptr<Rows> sums);

}  // namespace twostep
