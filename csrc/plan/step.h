// What one launch works on. Owned by the launch and immutable while it runs: a later step can be
// prepared, and block tables can change, without disturbing one in flight.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/types.h"

namespace twostep {

// Rows cut into even tiles of at most `max_rows`.
struct Tiles {
  struct Tile {
    int r0, rows;
  };
  std::vector<Tile> tiles;
  std::vector<int32_t> tile_of_row;

  void build(int num_rows, int max_rows);
  int size() const { return static_cast<int>(tiles.size()); }
  const Tile& of_row(int m) const { return tiles[tile_of_row[m]]; }
  // Calls f(tile, m, count) for every tile that has rows of `other`, which may be cut to another height:
  // count of them, the first is m.
  template <class Fn>
  void for_each(const Tile& other, Fn f) const {
    for (int m = other.r0, end = other.r0 + other.rows; m < end;) {
      const Tile& tile = of_row(m);
      const int count = std::min(end, tile.r0 + tile.rows) - m;
      f(tile, m, count);
      m += count;
    }
  }
};

// The two sets of rows that ops work on: every token of the flat batch, or the sampled rows only.
enum class RowSet : uint8_t { Tokens, Logits };

struct SampleStep;  // what sampling reads and writes, see ops/sample.h
struct PooledStep;  // where pooling writes, see ops/pool.h
struct AttentionWork;  // how attention cuts a step into tasks, see ops/attention_work.h

struct Step {
  int num_tokens = 0;  // T
  int num_reqs = 0;
  int num_logits = 0;  // S
  std::vector<int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<int32_t> seq_lens;         // [num_reqs] computed + scheduled
  std::vector<int32_t> rows;             // [num_reqs] the request's permanent row
  std::vector<int32_t> logits_indices;   // [S] flat token index
  std::vector<int32_t> logits_reqs;      // [S] request (index into the arrays above) of each
  std::vector<int32_t> block_ids;        // the requests' block tables, one after the other
  std::vector<int32_t> block_starts;     // [num_reqs + 1] into block_ids
  // [num_reqs], or empty: positions of a request below this are in the cache already, in blocks that
  // others may share, and are not written again.
  std::vector<int32_t> cached_lens;
  // Writes to device state (token rows, sampling parameters) that must happen in stream order, after
  // everything earlier steps do: a row that this step gives to a new request may still be in use by
  // the step in flight. Run by the op ApplyStaged at the head of the forward plan.
  std::vector<std::function<void()>> staged;
  std::shared_ptr<SampleStep> sample;
  // Derived by `derive`:
  std::vector<int32_t> positions;    // [T]
  std::vector<int32_t> req_of_token; // [T]
  bool has_lone_tokens = false;      // every request has one token
  bool samples_all = false;          // the logits rows are the tokens, in their order
  Tiles tiles[2][kNumActForms];      // [RowSet][ActForm]
  // Derived by attention when it is launched, once for all layers of a kind: kept under the mutex, found
  // without it, the newest first.
  mutable std::mutex attention_mutex;
  mutable std::vector<std::shared_ptr<const AttentionWork>> attention_work;
  mutable std::atomic<const AttentionWork*> newest_attention_work{nullptr};
  std::shared_ptr<PooledStep> pooled;

  bool is_cached(int t) const {
    return !cached_lens.empty() && positions[t] < cached_lens[req_of_token[t]];
  }
  int num_rows(RowSet set) const { return set == RowSet::Tokens ? num_tokens : num_logits; }
  const Tiles& tiles_of(RowSet set, ActForm form) const {
    return tiles[static_cast<int>(set)][static_cast<int>(form)];
  }
  // `max_rows[form]`: the kernels' tile height. Throws std::invalid_argument on broken lengths.
  void derive(const int max_rows[kNumActForms]);
};

}  // namespace twostep
