// What happens to q, k and v of one token before attention: norm each head of q and k where a weight is
// given, rotate, write k and v to the token's slot in the cache.
#pragma once
#include <memory>

#include "isa/kernels.h"
#include "ops/attention_cache.h"
#include "ops/rows.h"
#include "plan/plan.h"

namespace twostep {

struct RopeSpec {
  int num_heads = 0;
  float scale = 0;                 // of attention: rotated queries are q times what the softmax wants
  float softcap = 0;               // of attention, 0: none
  std::shared_ptr<RopeTable> table;
  bool interleaved = false;        // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  std::shared_ptr<Vector> q_norm;  // [head_dim] or null: RMSNorm of each head before the rotation
  std::shared_ptr<Vector> k_norm;
  float norm_eps = 0;
  bool may_sample = false;         // only the sampled tokens may attend
};

class Rope {
 public:
  // qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]. Throws std::invalid_argument where shapes disagree.
  Rope(const KernelTable&, std::shared_ptr<KVCache>, int layer, std::shared_ptr<Rows> qkv, RopeSpec);

  // Throws std::invalid_argument if a position of the step is beyond the table.
  void check_positions(const Step&) const;
  // Query heads first .. first + count - 1 of token t, rotated, into y [count, head_dim].
  void queries(const Step&, int t, int first, int count, float* y) const;
  // Fetches what `queries` reads.
  void fetch_queries(int t, int first, int count) const;
  // k and v of KV head h of token t into the cache, unless they are there already. Throws
  // std::out_of_range for a block outside it.
  void store(const Step&, int t, int h) const;
  // Whether the step's keys and values are written by the attention that reads them.
  bool leaves_writes(const Step& step) const {
    return step.has_lone_tokens && (!spec_.may_sample || step.samples_all);
  }
  // Fetches what `store` writes to for all KV heads.
  void fetch(const Step&, int t) const;

  KVCache& cache() const { return *cache_; }
  int layer() const { return layer_; }
  int num_heads() const { return spec_.num_heads; }
  int max_rows() const { return qkv_->max_rows; }
  bool may_sample() const { return spec_.may_sample; }

 private:
  RopeArgs args(const Step&, int t, float scale) const;
  void rotate(const float* x, const Vector* norm, const RopeArgs& args, int heads, float* y) const;
  size_t place(const Step&, int t) const;

  const RowKernels& row_kernels_;
  const AttentionKernels& kernels_;
  std::shared_ptr<KVCache> cache_;
  int layer_;
  std::shared_ptr<Rows> qkv_;
  RopeSpec spec_;
};

}  // namespace twostep
