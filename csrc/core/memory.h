// Large, aligned, zeroed memory that the kernel hands out lazily.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace twostep {

// An anonymous mapping, by default 2 MiB aligned and on huge pages where the system grants them (weights
// and activations are streamed). Untouched pages cost nothing. Freed by the destructor.
class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc with nothing leaked if the system refuses.
  explicit Memory(size_t bytes, bool huge_pages = true);
  ~Memory();
  Memory(Memory&& o) noexcept { *this = std::move(o); }
  Memory& operator=(Memory&& o) noexcept {
    std::swap(base_, o.base_);
    std::swap(mapped_, o.mapped_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  size_t mapped_ = 0;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory for many things that live and die together (a model's weights), cut from large chunks: they
// lie on huge pages even where each by itself is small. Streaming weights is a third faster so.
class Arena {
 public:
  // Zeroed, aligned to 4 KiB; keeps its chunk alive. Not for several threads at once.
  std::shared_ptr<uint8_t> allocate(size_t bytes);

 private:
  std::shared_ptr<Memory> chunk_;
  size_t used_ = 0;
};

}  // namespace twostep
