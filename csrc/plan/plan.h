// A recorded forward pass: ops over static buffers. Replayed with each step's own sizes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/act.h"
#include "core/memory.h"
#include "plan/op.h"

namespace twostep {

// Row-major float32 [max_rows, width]: the residual stream, qkv, logits.
struct Rows {
  Memory memory;
  float* data = nullptr;
  int width = 0;
  int max_rows = 0;

  Rows(int width_, int max_rows_);
  float* row(int m) const { return data + static_cast<size_t>(m) * width; }
};

class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  const std::vector<std::shared_ptr<const Op>>& ops() const { return ops_; }
  // Ops first .. last - 1 as a plan of their own; both plans share them. Throws std::out_of_range.
  std::shared_ptr<Plan> slice(size_t first, size_t last) const;

 private:
  std::vector<std::shared_ptr<const Op>> ops_;
};

}  // namespace twostep
