#include "ops/pool.h"

#include <algorithm>
#include <stdexcept>

#include "isa/rows.h"

namespace twostep {

namespace {

PooledStep& target(const Step& step, int width) {
  if (!step.pooled || step.pooled->width != width) {
    throw std::invalid_argument("pool: the step has no place for vectors of this width");
  }
  return *step.pooled;
}

class PoolRows final : public Op {
 public:
  explicit PoolRows(std::shared_ptr<Rows> x) : x_(std::move(x)) {}
  const char* name() const override { return "pool_rows"; }
  int num_chunks(const Step& step) const override {
    target(step, x_->width);
    return step.num_logits;
  }
  void run(const Step& step, int s, Worker&) const override {
    std::copy_n(x_->row(s), x_->width, step.pooled->row(s));
  }

 private:
  const std::shared_ptr<Rows> x_;
};

// One chunk a request.
class PoolMean final : public Op {
 public:
  PoolMean(const KernelTable& table, std::shared_ptr<Rows> x, std::shared_ptr<Rows> sums)
      : kernels_(*table.rows), x_(std::move(x)), sums_(std::move(sums)) {
    if (x_->width != sums_->width) throw std::invalid_argument("pool_mean: rows and sums differ in width");
  }
  const char* name() const override { return "pool_mean"; }
  int num_chunks(const Step& step) const override {
    target(step, x_->width);
    for (const int32_t row : step.rows) {
      if (row < 0 || row >= sums_->max_rows) throw std::invalid_argument("pool_mean: no such permanent row");
    }
    return step.num_reqs;
  }
  void run(const Step& step, int r, Worker&) const override {
    float* sum = sums_->row(step.rows[r]);
    const int begin = step.query_start_loc[r], end = step.query_start_loc[r + 1];
    if (begin < end && step.positions[begin] == 0) std::fill_n(sum, x_->width, 0.0f);
    for (int t = begin; t < end; t++) kernels_.add(sum, x_->row(t), x_->width);
    for (int s = 0; s < step.num_logits; s++) {
      if (step.logits_reqs[s] != r) continue;
      const float length = static_cast<float>(step.seq_lens[r]);
      float* mean = step.pooled->row(s);
      for (int i = 0; i < x_->width; i++) mean[i] = sum[i] / length;
    }
  }

 private:
  const RowKernels& kernels_;
  const std::shared_ptr<Rows> x_, sums_;
};

}  // namespace

std::unique_ptr<Op> make_pool_rows(std::shared_ptr<Rows> x) {
  return std::make_unique<PoolRows>(std::move(x));
}

std::unique_ptr<Op> make_pool_mean(const KernelTable& table, std::shared_ptr<Rows> x,
                                   std::shared_ptr<Rows> sums) {
  return std::make_unique<PoolMean>(table, std::move(x), std::move(sums));
}

}  // namespace twostep
