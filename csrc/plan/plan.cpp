#include "plan/plan.h"

#include <stdexcept>

namespace twostep {

Rows::Rows(int width_, int max_rows_)
    : memory(static_cast<size_t>(width_) * max_rows_ * sizeof(float) + 64),
      data(memory.as<float>()),
      width(width_),
      max_rows(max_rows_) {}

std::shared_ptr<Plan> Plan::slice(size_t first, size_t last) const {
  if (first > last || last > ops_.size()) throw std::out_of_range("plan: no such ops");
  auto part = std::make_shared<Plan>();
  part->ops_.assign(ops_.begin() + static_cast<std::ptrdiff_t>(first),
                    ops_.begin() + static_cast<std::ptrdiff_t>(last));
  return part;
}

}  // namespace twostep
