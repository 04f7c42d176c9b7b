// Attention over the paged cache, in two ops: rotate q and k and write the step's KV, then attend.
#pragma once
#include <memory>
#include <vector>

#include "isa/kernels.h"
#include "ops/attention_cache.h"
#include "ops/rows.h"
#include "plan/plan.h"

namespace twostep {

struct RopeSpec {
  int num_heads = 0;
  float scale = 0;                 // of attention: q_out is q times what the softmax wants
  float softcap = 0;               // of attention, 0: none
  std::shared_ptr<RopeTable> table;
  bool interleaved = false;        // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  std::shared_ptr<Vector> q_norm;  // [head_dim] or null: RMSNorm of each head before the rotation
  std::shared_ptr<Vector> k_norm;
  float norm_eps = 0;
};

// qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] -> q_out [T, num_heads * head_dim], and k and v
// into the tokens' slots of `layer`.
std::unique_ptr<Op> make_rope_cache(const KernelTable&, std::shared_ptr<KVCache>, int layer,
                                    std::shared_ptr<Rows> qkv, std::shared_ptr<Rows> q_out, RopeSpec);

struct AttentionSpec {
  int num_heads = 0;
  int sliding_window = 0;  // 0: none
  float softcap = 0;       // 0: none; the one that make_rope_cache was given
  int num_threads = 0;     // of the stream
  bool causal = true;      // false: every token sees the whole text, which must be in one step
};

// Appends the ops that compute softmax(q k^T) v for every token, q from make_rope_cache, into `rows` (float32
// [T, num_heads * head_dim], may be null) and activations of that width.
void add_attention(Plan&, const KernelTable&, std::shared_ptr<KVCache>, int layer,
                   std::shared_ptr<Rows> q, const AttentionSpec&, std::shared_ptr<Rows> rows,
                   std::vector<std::shared_ptr<ActBuffer>> acts);

}  // namespace twostep
