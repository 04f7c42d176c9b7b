#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa/rows.h"
#include "ops/attention.h"
#include "plan/row_chunks.h"

namespace twostep {

namespace {

constexpr int kMaxHeadDim = 1024;

void check(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument("rope_cache: " + what);
}

class RopeCache final : public Op {
 public:
  RopeCache(const KernelTable& table, std::shared_ptr<KVCache> cache, int layer,
            std::shared_ptr<Rows> qkv, std::shared_ptr<Rows> q_out, RopeSpec spec)
      : row_kernels_(*table.rows),
        kernels_(*table.attention),
        cache_(std::move(cache)),
        layer_(layer),
        qkv_(std::move(qkv)),
        q_out_(std::move(q_out)),
        spec_(std::move(spec)) {
    const int d = cache_->head_dim, kv = cache_->num_kv_heads, heads = spec_.num_heads;
    check(&cache_->kernels == &kernels_, "the cache was made for another instruction set");
    check(layer >= 0 && layer < cache_->num_layers, "layer is outside the cache");
    check(d <= kMaxHeadDim, "head_dim is larger than " + std::to_string(kMaxHeadDim));
    check(heads > 0 && heads % kv == 0, "num_heads must be a multiple of num_kv_heads");
    check(qkv_->width == (heads + 2 * kv) * d, "qkv is not (num_heads + 2 * num_kv_heads) * head_dim wide");
    check(q_out_->width == heads * d, "q_out is not num_heads * head_dim wide");
    check(2 * spec_.table->half <= d, "the rope table is wider than head_dim");
    check((!spec_.q_norm || spec_.q_norm->size == d) && (!spec_.k_norm || spec_.k_norm->size == d),
          "q_norm or k_norm is not head_dim wide");
  }
  const char* name() const override { return "rope_cache"; }

  int num_chunks(const Step& step) const override {
    for (int r = 0; r < step.num_reqs; r++) {
      if (step.query_start_loc[r] < step.query_start_loc[r + 1] &&
          step.seq_lens[r] > spec_.table->max_position) {
        throw std::invalid_argument("rope_cache: position " + std::to_string(step.seq_lens[r] - 1) +
                                    " is beyond the rope table of " +
                                    std::to_string(spec_.table->max_position) + " positions");
      }
    }
    if (layer_ == 0) cache_->expect(step.block_ids);
    return RowChunks(step.num_tokens).count();
  }

  void run(const Step& step, int chunk, int) const override {
    const RowChunks chunks(step.num_tokens);
    for (int t = chunks.begin(chunk); t < chunks.end(chunk); t++) token(step, t);
  }

 private:
  void rotate(const float* x, const Vector* norm, RopeArgs rope, float scale, float* y) const {
    rope.scale = scale;
    if (norm) {
      row_kernels_.rms_norm({x, norm->data, rope.head_dim, spec_.norm_eps}, y);
      x = y;
    }
    kernels_.rope(x, rope, y);
  }

  void token(const Step& step, int t) const {
    const int d = cache_->head_dim, heads = spec_.num_heads, kv = cache_->num_kv_heads;
    const int position = step.positions[t], r = step.req_of_token[t];
    const int32_t block = step.block_ids.at(step.block_starts[r] + position / kBlockSize);
    if (block < 0 || block >= cache_->num_blocks) throw std::out_of_range("block id outside the cache");
    const size_t row = static_cast<size_t>(position) * spec_.table->half;
    const RopeArgs rope{spec_.table->cos + row, spec_.table->sin + row, 2 * spec_.table->half, d,
                        spec_.interleaved, 1};
    const float q_scale = query_scale(spec_.scale, spec_.softcap);
    const float* x = qkv_->row(t);
    const size_t place = cache_->places().of(block);
    const bool is_next = t > 0 && step.req_of_token[t - 1] == r && position % kBlockSize != 0;
    if (!is_next && !step.is_cached(t)) fetch(place);
    for (int h = 0; h < heads; h++) {
      rotate(x + h * d, spec_.q_norm.get(), rope, q_scale, q_out_->row(t) + h * d);
    }
    if (step.is_cached(t)) return;
    for (int h = 0; h < kv; h++) {
      float k[kMaxHeadDim];
      rotate(x + (heads + h) * d, spec_.k_norm.get(), rope, 1, k);
      cache_->layout().write_token(k, x + (heads + kv + h) * d, d,
                                   static_cast<char*>(cache_->k_blocks(layer_, h)) + place,
                                   static_cast<char*>(cache_->v_blocks(layer_, h)) + place,
                                   position % kBlockSize);
    }
  }

  // The block of a sequence's first token here. A key goes into every line of it, one store each: they
  // would be fetched one after the other, and attention reads the block right after.
  void fetch(size_t place) const {
    const size_t bytes = cache_->places().block_bytes;
    for (int h = 0; h < cache_->num_kv_heads; h++) {
      for (void* pool : {cache_->k_blocks(layer_, h), cache_->v_blocks(layer_, h)}) {
        const char* block = static_cast<char*>(pool) + place;
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + i);
      }
    }
  }

  const RowKernels& row_kernels_;
  const AttentionKernels& kernels_;
  std::shared_ptr<KVCache> cache_;
  int layer_;
  std::shared_ptr<Rows> qkv_, q_out_;
  RopeSpec spec_;
};

}  // namespace

std::unique_ptr<Op> make_rope_cache(const KernelTable& table, std::shared_ptr<KVCache> cache,
                                    int layer, std::shared_ptr<Rows> qkv,
                                    std::shared_ptr<Rows> q_out, RopeSpec spec) {
  return std::make_unique<RopeCache>(table, std::move(cache), layer, std::move(qkv),
                                     std::move(q_out), std::move(spec));
}

}  // namespace twostep
