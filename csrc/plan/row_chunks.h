// How ops over rows are cut: few rows one by one, so that all threads have some, many in chunks that
// are worth the claim.
#pragma once
#include <algorithm>

namespace twostep {

class RowChunks {
 public:
  explicit RowChunks(int rows) : rows_(rows), height_(std::clamp(rows / 8, 1, 8)) {}
  int count() const { return (rows_ + height_ - 1) / height_; }
  int begin(int chunk) const { return chunk * height_; }
  int end(int chunk) const { return std::min(rows_, (chunk + 1) * height_); }

 private:
  int rows_, height_;
};

}  // namespace twostep
