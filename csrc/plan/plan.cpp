#include "plan/plan.h"

namespace twostep {

Rows::Rows(int width_, int max_rows_)
    : memory(static_cast<size_t>(width_) * max_rows_ * sizeof(float) + 64),
      data(memory.as<float>()),
      width(width_),
      max_rows(max_rows_) {}

}  // namespace twostep
