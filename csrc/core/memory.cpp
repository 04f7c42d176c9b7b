#include "core/memory.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <new>

namespace twostep {

namespace {
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kPage = 4096;
#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1
#endif

// Of this thread: that somebody else had its processor in the meantime says nothing about pages.
int64_t thread_time() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t{1'000'000'000} * t.tv_sec + t.tv_nsec;
}

// The bytes of [at, to) of what lies below `end` that are to be done next, a huge page of them; empty if none.
struct Piece {
  size_t at, to;
};
Piece next_piece(std::atomic<size_t>& done, size_t end) {
  size_t at = done.load(std::memory_order_relaxed);
  while (at < end && !done.compare_exchange_weak(at, std::min(at + kHuge, end))) {
  }
  return {at, std::max(at, std::min(at + kHuge, end))};
}
}  // namespace

Memory::Memory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
  madvise(data_, bytes, MADV_NOHUGEPAGE);  // some systems give huge pages to whoever does not refuse them
}

Memory::~Memory() {
  if (data_) munmap(data_, bytes_);
}

PatientMemory::PatientMemory(size_t bytes, int64_t dear_nanoseconds)
    : memory_(bytes + kHuge), bytes_(bytes), dear_nanoseconds_(dear_nanoseconds) {
  data_ = memory_.as<uint8_t>();
  data_ += (kHuge - reinterpret_cast<uintptr_t>(data_) % kHuge) % kHuge;
  if (dear_nanoseconds < 0) {
    become_dear(0);
  } else if (bytes >= kHuge) {
    want_huge_pages(true, 0, bytes);
  }
}

void PatientMemory::want_huge_pages(bool wanted, size_t at, size_t bytes) {
  madvise(data_ + at, bytes, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

void PatientMemory::become_dear(size_t from) {
  if (bytes() < kHuge || is_dear_.exchange(true)) return;
  promoted_.store(from);
  if (from < bytes()) want_huge_pages(false, from, bytes() - from);
}

bool PatientMemory::take(size_t end) {
  const Piece piece = next_piece(taken_, std::min((end + kHuge - 1) / kHuge * kHuge, bytes()));
  if (piece.at == piece.to) return false;
  const int64_t start = thread_time();
  // Another thread may be writing there: a byte is taken and put back in one.
  for (size_t i = piece.at; i < piece.to; i += kPage) {
    __atomic_fetch_or(data_ + i, uint8_t{0}, __ATOMIC_RELAXED);
  }
  if (!is_dear() && thread_time() - start > dear_nanoseconds_) become_dear(piece.at + kHuge);
  return true;
}

bool PatientMemory::promote(size_t end) {
  if (!is_dear()) return false;
  const Piece piece = next_piece(promoted_, std::min(end, bytes()) / kHuge * kHuge);
  if (piece.at == piece.to) return false;
  want_huge_pages(true, piece.at, kHuge);
  // An older system refuses; it then does so itself by and by (khugepaged).
  madvise(data_ + piece.at, kHuge, MADV_COLLAPSE);
  return true;
}

std::shared_ptr<uint8_t> Arena::allocate(size_t bytes) {
  constexpr size_t kChunk = size_t{32} << 20;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  if (chunks_.empty() || used_ + bytes > chunks_.back()->bytes()) {
    chunks_.push_back(std::make_shared<PatientMemory>(std::max(bytes, kChunk), dear_nanoseconds_));
    used_ = 0;
  }
  PatientMemory& chunk = *chunks_.back();
  uint8_t* start = chunk.as<uint8_t>() + used_;
  used_ += bytes;
  while (!chunk.is_dear() && chunk.take(used_)) {
  }
  if (chunk.is_dear()) dear_nanoseconds_ = -1;
  return {chunks_.back(), start};
}

bool Arena::promote() {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const auto& chunk) { return chunk->promote(chunk->bytes()); });
}

}  // namespace twostep
