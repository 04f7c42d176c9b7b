// The paged KV cache, and the tables that rotate q and k.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/memory.h"
#include "isa/attention.h"
#include "isa/kernels.h"

namespace twostep {

// Each worker's own memory while it works on a tile, and the partial results of tiles whose context
// is shared out. Every attention layer of a stream uses the same one: layers run one after another.
class AttentionScratch {
 public:
  // Rows that all partial results of one layer and step may have together.
  static constexpr int kPartialRows = 16384;

  AttentionScratch(int num_threads, int tile_rows, int head_dim);

  struct Worker {
    void* q;
    float* scores;
    AttentionPartial segment;  // of the segment at hand
    AttentionPartial total;    // of those before
    float* out;                // [rows, head_dim]
  };
  const Worker& worker(int i) const { return workers_[i]; }
  // Starting at row `first` of the kPartialRows; untouched memory costs nothing.
  AttentionPartial partial(int first) const;

  const int num_threads, tile_rows, head_dim;

 private:
  Memory memory_;
  AttentionPartial partials_;
  std::vector<Worker> workers_;
};

// [num_blocks / kNeighbours][layer][K, V][kNeighbours][KV head]. Zeroed, and taken from the system in
// huge pages as blocks are first written: what a few blocks hold in all layers lies in a few pages. A fresh
// page costs more than what is computed in the meantime (in virtual machines up to 4 ms a MiB: a sixth of
// a prefill), so idle threads touch what will be written next, in small pages where that is so.
class KVCache {
 public:
  // What is kept touched beyond the highest block that a step used: as much again as is in use, within bounds.
  static constexpr size_t kLeastAhead = size_t{64} << 20, kMostAhead = size_t{1} << 30;

  // Throws std::invalid_argument for a shape the kernels can't hold, std::bad_alloc.
  KVCache(const KernelTable&, int num_layers, int num_kv_heads, int head_dim, int num_blocks,
          int block_size, KVType);

  void* k_blocks(int layer, int head) const { return at(2 * layer, head); }
  void* v_blocks(int layer, int head) const { return at(2 * layer + 1, head); }
  const KVPlaces& places() const { return places_; }
  // A step with these blocks comes.
  void expect(const std::vector<int32_t>& block_ids);
  // Touches a huge page, if fewer are than should be; returns whether it did. From any thread.
  bool touch_ahead();
  // Makes a huge page of small ones that steps have used; returns whether there was one. From any thread.
  bool promote() { return memory_->promote(used_.load(std::memory_order_relaxed)); }
  size_t touched_bytes() const { return memory_->taken(); }
  // Of num_blocks blocks; the last neighbours may lack some.
  size_t nbytes() const { return places_.stride / kNeighbours * num_blocks; }
  const AttentionLayout& layout() const { return kernels.layout[static_cast<int>(type)]; }
  // The scratch for tiles of so many rows; made when first asked for.
  std::shared_ptr<const AttentionScratch> scratch(int num_threads, int tile_rows);

  const AttentionKernels& kernels;
  const int num_layers, num_kv_heads, head_dim, num_blocks;
  const KVType type;

 private:
  void* at(int which, int head) const {
    return memory_->as<char>() + which * kNeighbours * places_.block_bytes + head * places_.head_bytes;
  }

  KVPlaces places_;
  std::optional<PatientMemory> memory_;  // once the sizes are checked
  std::atomic<size_t> used_{0};  // bytes from the start
  std::mutex mutex_;
  std::vector<std::shared_ptr<const AttentionScratch>> scratch_;
};

// cos and sin of every position and pair, float32 [max_position, rotary_dim / 2].
struct RopeTable {
  Memory memory;
  float* cos = nullptr;
  float* sin = nullptr;
  int max_position;
  int half;  // rotary_dim / 2

  RopeTable(const float* cos_, const float* sin_, int max_position_, int half_);
};

}  // namespace twostep
