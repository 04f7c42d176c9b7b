// Memory that is going to be read, and fetched until then.
#pragma once
#include <cstddef>
#include <vector>

namespace twostep {

struct Stretch {
  const char* begin = nullptr;
  const char* end = nullptr;
};

// Products of fewer rows, or of bf16, keep memory busy with their weights, and fetch nothing besides.
inline constexpr int kFetchingRows = 4;

// Stretches of whole cache lines that one thread is going to read. Its loops that compute and leave memory idle fetch
// them, a few lines at a time, in order. Only hints: nothing is read, and what is no longer there does no harm.
class ReadAhead {
 public:
  void clear() {
    stretches_.clear();
    next_ = bytes_ = 0;
    at_ = end_ = nullptr;
  }
  void add(const char* begin, size_t bytes) {
    stretches_.push_back({begin, begin + bytes});
    bytes_ += bytes;
  }
  // All that was added.
  const std::vector<Stretch>& stretches() const { return stretches_; }
  size_t bytes() const { return bytes_; }
  // This, or null if nothing is left.
  ReadAhead* unless_done() { return at_ == end_ && next_ == stretches_.size() ? nullptr : this; }

  // Into the L2 cache, and on into the one behind where they are more than that holds.
  __attribute__((always_inline)) void fetch(int lines) {
    if (at_ == end_) {
      if (next_ == stretches_.size()) return;
      at_ = stretches_[next_].begin;
      end_ = stretches_[next_++].end;
    }
    for (; lines > 0 && at_ != end_; lines--, at_ += kLine) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr size_t kLine = 64;

  std::vector<Stretch> stretches_;
  size_t next_ = 0, bytes_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // what is left of the stretch at hand
};

}  // namespace twostep
