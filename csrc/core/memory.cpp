#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace twostep {

namespace {
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kPage = 4096;
}  // namespace

Memory::Memory(size_t bytes, bool huge_pages) : bytes_(bytes) {
  if (bytes == 0) return;
  const bool huge = huge_pages && bytes >= kHuge;
  const size_t align = huge ? kHuge : kPage;
  mapped_ = (bytes + align - 1) / align * align + (huge ? kHuge : 0);
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw std::bad_alloc();
  }
  const auto address = (reinterpret_cast<uintptr_t>(base_) + align - 1) / align * align;
  data_ = reinterpret_cast<void*>(address);
  // Said either way: some systems give huge pages to whoever does not refuse them.
  madvise(data_, (bytes + align - 1) / align * align, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

Memory::~Memory() {
  if (base_) munmap(base_, mapped_);
}

std::shared_ptr<uint8_t> Arena::allocate(size_t bytes) {
  constexpr size_t kChunk = size_t{32} << 20;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  if (!chunk_ || used_ + bytes > chunk_->bytes()) {
    chunk_ = std::make_shared<Memory>(std::max(bytes, kChunk));
    used_ = 0;
  }
  uint8_t* start = chunk_->as<uint8_t>() + used_;
  used_ += bytes;
  return {chunk_, start};
}

}  // namespace twostep
