// Large, aligned, zeroed memory that the kernel hands out lazily.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace twostep {

// An anonymous mapping on small pages: on huge ones buffers are hardly faster (docs/log.md), and take memory, and the
// time to clear it, for what is never touched. Freed by the destructor.
class Memory {
 public:
  Memory() = default;
  // Aligned to 4 KiB. Throws std::bad_alloc with nothing leaked if the system refuses.
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(Memory&& o) noexcept { *this = std::move(o); }
  Memory& operator=(Memory&& o) noexcept {
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
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory that is filled from its start, aligned to 2 MiB. It comes in huge pages, unless the system is slow to give them:
// a hypervisor that takes free memory back (free page reporting: microVMs, WSL, Docker Desktop) needs up to
// 25 ms for 2 MiB, since it looks for each 4 KiB of them; small pages come at first from what was never free as 2 MiB
// and never went back. So there it comes in small pages, and whoever is idle makes huge ones of them.
class PatientMemory {
 public:
  static constexpr int64_t kDearNanoseconds = 2'000'000;  // clearing 2 MiB takes 0.1 to 0.5 ms

  // A huge page that takes a thread longer than `dear_nanoseconds` is dear; if they are negative, each is.
  // Throws std::bad_alloc.
  explicit PatientMemory(size_t bytes, int64_t dear_nanoseconds = kDearNanoseconds);

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  // Takes the next 2 MiB from the system, if those below `end` are not taken yet; returns whether it did. If that
  // was dear, the rest comes in small pages. What lies there may be read and written meanwhile; from any thread.
  bool take(size_t end);
  size_t taken() const { return taken_.load(std::memory_order_relaxed); }
  bool is_dear() const { return is_dear_.load(std::memory_order_relaxed); }
  // Makes a huge page of the next small ones below `end`, if some are left; returns whether it tried. As take().
  bool promote(size_t end);

 private:
  // Whether what is touched from now on comes in huge pages.
  void want_huge_pages(bool wanted, size_t at, size_t bytes);
  void become_dear(size_t from);

  Memory memory_;
  size_t bytes_;
  uint8_t* data_ = nullptr;
  const int64_t dear_nanoseconds_;
  std::atomic<bool> is_dear_{false};
  std::atomic<size_t> taken_{0};
  std::atomic<size_t> promoted_{0};  // bytes from the start that are huge pages, or could not become them
};

// Memory for many things that live and die together (a model's weights), cut from large chunks: they
// lie on huge pages even where each by itself is small. Streaming weights is a third faster so.
class Arena {
 public:
  explicit Arena(int64_t dear_nanoseconds = PatientMemory::kDearNanoseconds)
      : dear_nanoseconds_(dear_nanoseconds) {}

  // Zeroed, aligned to 4 KiB; keeps its chunk alive. Not for several threads at once.
  std::shared_ptr<uint8_t> allocate(size_t bytes);
  // Makes a huge page of small ones, if some are left; returns whether it tried. From any thread, once
  // nothing is allocated any more.
  bool promote();

 private:
  int64_t dear_nanoseconds_;  // negative once huge pages have been dear: that is found out once
  std::vector<std::shared_ptr<PatientMemory>> chunks_;
  size_t used_ = 0;  // of the last one
};

}  // namespace twostep
