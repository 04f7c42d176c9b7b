// All known tokens of every running request: the prompt, then the outputs as they are sampled.
// Owned by the device: written by staged writes and by the sampler, in stream order, so step k+1
// reads the token that step k sampled without the host ever seeing it.
#pragma once
#include <cstdint>
#include <stdexcept>

#include "core/memory.h"

namespace twostep {

class TokenTable {
 public:
  TokenTable(int num_rows, int max_len)
      : memory_(static_cast<size_t>(num_rows) * max_len * sizeof(int32_t)),
        ids_(memory_.as<int32_t>()),
        num_rows_(num_rows),
        max_len_(max_len) {}

  int32_t* row(int r) const { return ids_ + static_cast<size_t>(r) * max_len_; }
  int num_rows() const { return num_rows_; }
  int max_len() const { return max_len_; }

  void check(int row, int start, int count) const {
    if (row < 0 || row >= num_rows_ || start < 0 || count < 0 || start + count > max_len_) {
      throw std::out_of_range("token table: row or position out of range");
    }
  }

 private:
  Memory memory_;
  int32_t* ids_;
  int num_rows_;
  int max_len_;
};

}  // namespace twostep
