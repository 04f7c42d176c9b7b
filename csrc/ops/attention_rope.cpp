#include "ops/attention_rope.h"

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
  RopeCache(std::shared_ptr<const Rope> rope, std::shared_ptr<Rows> q_out)
      : rope_(std::move(rope)), q_out_(std::move(q_out)) {
    check(!q_out_ || q_out_->width == rope_->num_heads() * rope_->cache().head_dim,
          "q_out is not num_heads * head_dim wide");
  }
  const char* name() const override { return "rope_cache"; }

  int num_chunks(const Step& step) const override {
    rope_->check_positions(step);
    if (rope_->layer() == 0) rope_->cache().expect(step.block_ids);
    if (!q_out_ && rope_->leaves_writes(step)) return 0;
    return RowChunks(step.num_tokens).count();
  }

  void run(const Step& step, int chunk, Worker&) const override {
    const RowChunks chunks(step.num_tokens);
    for (int t = chunks.begin(chunk); t < chunks.end(chunk); t++) {
      rope_->fetch(step, t);
      if (q_out_) rope_->queries(step, t, 0, rope_->num_heads(), q_out_->row(t));
      for (int h = 0; h < rope_->cache().num_kv_heads; h++) rope_->store(step, t, h);
    }
  }

 private:
  std::shared_ptr<const Rope> rope_;
  std::shared_ptr<Rows> q_out_;
};

}  // namespace

Rope::Rope(const KernelTable& table, std::shared_ptr<KVCache> cache, int layer, std::shared_ptr<Rows> qkv,
           RopeSpec spec)
    : row_kernels_(*table.rows),
      kernels_(*table.attention),
      cache_(std::move(cache)),
      layer_(layer),
      qkv_(std::move(qkv)),
      spec_(std::move(spec)) {
  const int d = cache_->head_dim, kv = cache_->num_kv_heads, heads = spec_.num_heads;
  check(&cache_->kernels == &kernels_, "the cache was made for another instruction set");
  check(layer >= 0 && layer < cache_->num_layers, "layer is outside the cache");
  check(d <= kMaxHeadDim, "head_dim is larger than " + std::to_string(kMaxHeadDim));
  check(heads > 0 && heads % kv == 0, "num_heads must be a multiple of num_kv_heads");
  check(qkv_->width == (heads + 2 * kv) * d, "qkv is not (num_heads + 2 * num_kv_heads) * head_dim wide");
  check(2 * spec_.table->half <= d, "the rope table is wider than head_dim");
  check((!spec_.q_norm || spec_.q_norm->size == d) && (!spec_.k_norm || spec_.k_norm->size == d),
        "q_norm or k_norm is not head_dim wide");
}

void Rope::check_positions(const Step& step) const {
  for (int r = 0; r < step.num_reqs; r++) {
    if (step.query_start_loc[r] < step.query_start_loc[r + 1] &&
        step.seq_lens[r] > spec_.table->max_position) {
      throw std::invalid_argument("rope_cache: position " + std::to_string(step.seq_lens[r] - 1) +
                                  " is beyond the rope table of " +
                                  std::to_string(spec_.table->max_position) + " positions");
    }
  }
}

RopeArgs Rope::args(const Step& step, int t, float scale) const {
  const RopeTable& table = *spec_.table;
  const size_t row = static_cast<size_t>(step.positions[t]) * table.half;
  return {table.cos + row, table.sin + row, 2 * table.half, cache_->head_dim, spec_.interleaved, scale};
}

void Rope::rotate(const float* x, const Vector* norm, const RopeArgs& args, int heads, float* y) const {
  if (norm) {
    for (int i = 0; i < heads * args.head_dim; i += args.head_dim) {
      row_kernels_.rms_norm({x + i, norm->data, args.head_dim, spec_.norm_eps}, y + i);
    }
    x = y;
  }
  kernels_.rope(x, args, heads, y);
}

void Rope::queries(const Step& step, int t, int first, int count, float* y) const {
  const int d = cache_->head_dim;
  const RopeArgs rope = args(step, t, query_scale(spec_.scale, spec_.softcap));
  rotate(qkv_->row(t) + first * d, spec_.q_norm.get(), rope, count, y);
}

void Rope::fetch_queries(int t, int first, int count) const {
  const int d = cache_->head_dim;
  const char* q = reinterpret_cast<const char*>(qkv_->row(t) + first * d);
  for (size_t i = 0; i < count * d * sizeof(float); i += 64) __builtin_prefetch(q + i);
}

size_t Rope::place(const Step& step, int t) const {
  const int first = step.block_starts[step.req_of_token[t]];
  const int32_t block = step.block_ids.at(first + step.positions[t] / kBlockSize);
  if (block < 0 || block >= cache_->num_blocks) throw std::out_of_range("block id outside the cache");
  return cache_->places().of(block);
}

void Rope::store(const Step& step, int t, int h) const {
  if (step.is_cached(t)) return;
  const int d = cache_->head_dim, kv = cache_->num_kv_heads, heads = spec_.num_heads;
  const float* x = qkv_->row(t);
  const size_t at = place(step, t);
  float k[kMaxHeadDim];
  rotate(x + (heads + h) * d, spec_.k_norm.get(), args(step, t, 1), 1, k);
  cache_->layout().write_token(k, x + (heads + kv + h) * d, d,
                               static_cast<char*>(cache_->k_blocks(layer_, h)) + at,
                               static_cast<char*>(cache_->v_blocks(layer_, h)) + at,
                               step.positions[t] % kBlockSize);
}

// The block of a sequence's first token here. A key goes into every line of it, one store each: they would
// be fetched one after the other, and attention reads the block right after.
void Rope::fetch(const Step& step, int t) const {
  const int r = step.req_of_token[t];
  const bool is_next = t > 0 && step.req_of_token[t - 1] == r && step.positions[t] % kBlockSize != 0;
  if (is_next || step.is_cached(t)) return;
  const size_t at = place(step, t), bytes = cache_->places().block_bytes;
  for (void* pool : {cache_->k_blocks(layer_, 0), cache_->v_blocks(layer_, 0)}) {
    const char* block = static_cast<char*>(pool) + at;
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + i);
  }
}

std::unique_ptr<Op> make_rope_cache(std::shared_ptr<const Rope> rope, std::shared_ptr<Rows> q_out) {
  return std::make_unique<RopeCache>(std::move(rope), std::move(q_out));
}

}  // namespace twostep
