// Attention over the paged cache, in two ops: rotate k and write the step's KV, then attend; each task rotates
// the few heads of q that it needs. Where every request has one token, attention does both: a task writes the
// key and value that nobody else reads, and the threads meet once less in a layer.
#pragma once
#include <memory>
#include <vector>

#include "isa/kernels.h"
#include "ops/attention_cache.h"
#include "ops/attention_rope.h"
#include "ops/rows.h"
#include "plan/plan.h"

namespace twostep {

// k, rotated, and v into the tokens' slots, and q, rotated, into q_out [T, num_heads * head_dim]. Without q_out,
// queries are left to an attention that has `rope`, and so is a step in which every request has one token (and, if
// that attention may be of the sampled tokens, all are).
std::unique_ptr<Op> make_rope_cache(std::shared_ptr<const Rope> rope, std::shared_ptr<Rows> q_out);

struct AttentionSpec {
  int num_heads = 0;
  int sliding_window = 0;  // 0: none
  float softcap = 0;       // 0: none; the one that make_rope_cache was given
  int num_threads = 0;     // of the stream
  bool causal = true;      // false: every token sees the whole text, which must be in one step
  RowSet queries = RowSet::Tokens;  // Logits: only the sampled tokens attend (the last layer's)
};

// Appends the ops that compute softmax(q k^T) v for every query into `rows` (float32 [T or S, num_heads *
// head_dim], may be null) and activations of that width. Queries are `q` as make_rope_cache leaves them, or rotated by
// `rope`: one of the two is null.
void add_attention(Plan&, const KernelTable&, std::shared_ptr<KVCache>, int layer,
                   std::shared_ptr<Rows> q, std::shared_ptr<const Rope> rope, const AttentionSpec&,
                   std::shared_ptr<Rows> rows, std::vector<std::shared_ptr<ActBuffer>> acts);

}  // namespace twostep
