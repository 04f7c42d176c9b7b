// How attention cuts a step into tasks. The cut is free: it changes no result (see isa/attention.h).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/step.h"

namespace twostep {

// What the cut depends on besides the step.
struct AttentionShape {
  int num_kv_heads;
  int heads_together; // KV heads of a token alone that a task may take
  int group;          // query heads of one KV head
  int window;         // 0: none
  int tile_tokens;    // query tokens of a tile, at most
  int num_threads;
  int num_blocks;     // of the cache
  int partial_rows;   // room for partial results
  bool causal;        // false: every token sees the whole text
  RowSet queries;     // the tokens that attend: all, or the sampled ones

  bool operator==(const AttentionShape& o) const {
    return num_kv_heads == o.num_kv_heads && heads_together == o.heads_together && group == o.group &&
           window == o.window &&
           tile_tokens == o.tile_tokens && num_threads == o.num_threads &&
           num_blocks == o.num_blocks && partial_rows == o.partial_rows && causal == o.causal &&
           queries == o.queries;
  }
};

// Some tokens of one request, the query heads of one KV head (of several, if it is one token), some
// segments of their context.
struct AttentionTask {
  int req;
  int token;               // first, in the flat batch
  int row;                 // first, of the queries' row set
  int num_tokens;
  int kv_head, num_heads;  // the first, and how many
  int segment_begin, segment_end;
  // -1: these are all segments there are. Else the first row of the tile's partial results, which
  // those of segment s follow at (s - first segment of the tile) * rows.
  int partial_row;
  int64_t cost;  // rows * positions, for the order of tasks
};

struct AttentionWork {
  AttentionShape shape;
  std::vector<AttentionTask> tasks;   // chunk i is tasks[i]
  std::vector<AttentionTask> merges;  // tiles whose segments several tasks share: all their segments
  const AttentionWork* before;        // what the same step got before this, or null
};

// The segments that tokens position .. position + num_tokens - 1 see, and how many positions.
struct AttentionSpan {
  int segment_begin, segment_end;
  int positions;
};
AttentionSpan attention_span(int position, int num_tokens, int window);
// What `num_tokens` tokens of request `req` see, the first at `token` in the flat batch.
AttentionSpan tile_span(const Step&, const AttentionShape&, int req, int token, int num_tokens);

// The work of this step, kept with it. Throws std::invalid_argument where the step doesn't fit the
// cache: a block table made for other blocks, a block id out of range; or, without a causal mask, has
// only a part of a text.
const AttentionWork& attention_work(const Step&, const AttentionShape&);

}  // namespace twostep
