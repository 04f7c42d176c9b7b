#include "ops/attention.h"

#include <algorithm>
#include <stdexcept>

#include "ops/attention_work.h"

namespace twostep {

namespace {

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("attention: ") + what);
}

// What both ops of a layer need.
struct Layer {
  std::shared_ptr<KVCache> cache;
  int index;
  std::shared_ptr<Rows> q;           // or null
  std::shared_ptr<const Rope> rope;  // or null
  AttentionSpec spec;
  std::shared_ptr<Rows> rows;  // may be null
  std::vector<std::shared_ptr<ActBuffer>> acts;
  AttentionShape shape;
  std::shared_ptr<const AttentionScratch> scratch;

  // Whether tasks write the KV of their tokens.
  bool writes(const Step& step) const { return rope && rope->leaves_writes(step); }

  // Divides by the sums and writes a tile's heads to where they are wanted.
  void finish(const Step& step, const AttentionTask& task, const AttentionPartial& total,
              float* out) const {
    const int rows_of_token = task.num_heads * shape.group, width = rows_of_token * cache->head_dim;
    const int column = task.kv_head * shape.group * cache->head_dim;
    cache->kernels.finish(total, task.num_tokens * rows_of_token, cache->head_dim, out);
    for (int i = 0; i < task.num_tokens; i++, out += width) {
      const int m = task.row + i;
      if (rows) std::copy_n(out, width, rows->row(m) + column);
      for (const auto& act : acts) {
        const auto& tile = step.tiles_of(shape.queries, act->act().form).of_row(m);
        cache->kernels.put_groups(out, column / kGroup, width / kGroup, act->act(), tile.r0,
                                  tile.rows, m);
      }
    }
  }
};

// Walks each task's segments in order.
class Attention final : public Op {
 public:
  explicit Attention(std::shared_ptr<const Layer> layer) : layer_(std::move(layer)) {}
  const char* name() const override { return "attention"; }
  int num_chunks(const Step& step) const override {
    return static_cast<int>(attention_work(step, layer_->shape).tasks.size());
  }

  void run(const Step& step, int chunk, Worker& worker) const override {
    const Layer& layer = *layer_;
    const std::vector<AttentionTask>& tasks = attention_work(step, layer.shape).tasks;
    const AttentionTask& task = tasks[chunk];
    if (static_cast<size_t>(chunk) + 1 < tasks.size()) {
      fetch_queries(tasks[chunk + 1]);
      fetch_first_keys(step, tasks[chunk + 1]);
    }
    const AttentionScratch::Worker& scratch = layer.scratch->worker(worker.index);
    const AttentionSpan span = tile_span(step, layer.shape, task.req, task.token, task.num_tokens);
    // Whoever reads the token's own key and value writes them.
    if (layer.writes(step) && task.segment_end == span.segment_end) {
      for (int h = 0; h < task.num_heads; h++) layer.rope->store(step, task.token, task.kv_head + h);
    }
    const AttentionTile tile = pack_tile(step, task, scratch);
    if (task.partial_row < 0) {
      walk(tile, task, scratch);
      layer.finish(step, task, scratch.total, scratch.out);
      return;
    }
    for (int s = task.segment_begin; s < task.segment_end; s++) {
      const int row = task.partial_row + (s - span.segment_begin) * tile.rows;
      layer.cache->layout().attend_segment(tile, s, layer.scratch->partial(row));
    }
  }

  bool reads_cache() const override { return true; }
  // Of tokens alone: the tiles of a prompt compute more than they read.
  void add_cached(const Step& step, int first, int end, ReadAhead& ahead) const override {
    if (step.num_tokens < kFetchingRows) return;
    const std::vector<AttentionTask>& tasks = attention_work(step, layer_->shape).tasks;
    for (int i = first; i < end && ahead.bytes() < kMostAhead; i++) {
      if (tasks[i].num_tokens == 1) add_blocks(step, tasks[i], ahead);
    }
  }

 private:
  // More than products find the time to fetch.
  static constexpr size_t kMostAhead = 2 << 20;

  // As kernels read them: a segment's keys, then its values.
  void add_blocks(const Step& step, const AttentionTask& task, ReadAhead& ahead) const {
    const KVCache& cache = *layer_->cache;
    const int32_t* ids = step.block_ids.data() + step.block_starts[task.req];
    const AttentionSpan span = tile_span(step, layer_->shape, task.req, task.token, task.num_tokens);
    const int end = layer_->shape.causal ? step.positions[task.token] + 1 : step.seq_lens[task.req];
    const size_t bytes = task.num_heads * cache.places().head_bytes;
    for (int s = task.segment_begin; s < task.segment_end; s++) {
      const int first_block = std::max(s * kSegment, end - span.positions) / kBlockSize;
      const int last_block = (std::min((s + 1) * kSegment, end) - 1) / kBlockSize;
      for (void* pool : {cache.k_blocks(layer_->index, task.kv_head), cache.v_blocks(layer_->index, task.kv_head)}) {
        for (int b = first_block; b <= last_block; b++) {
          ahead.add(static_cast<const char*>(pool) + cache.places().of(ids[b]), bytes);
        }
      }
    }
  }

  // What a task reads first, while the one before it is under way: within a task, kernels look ahead.
  void fetch_queries(const AttentionTask& task) const {
    if (!layer_->rope) return;
    const int group = layer_->shape.group;
    for (int i = 0; i < task.num_tokens; i++) {
      layer_->rope->fetch_queries(task.token + i, task.kv_head * group, task.num_heads * group);
    }
  }

  void fetch_first_keys(const Step& step, const AttentionTask& task) const {
    const KVCache& cache = *layer_->cache;
    const int32_t* ids = step.block_ids.data() + step.block_starts[task.req];
    const int first = task.segment_begin * (kSegment / kBlockSize);
    const int blocks = (step.seq_lens[task.req] + kBlockSize - 1) / kBlockSize;
    const size_t bytes = task.num_heads * cache.places().head_bytes;
    const auto fetch = [&](void* pool, int b) {
      const char* block = static_cast<char*>(pool) + cache.places().of(ids[b]);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + i, 0, 2);
    };
    void* keys = cache.k_blocks(layer_->index, task.kv_head);
    for (int b = first; b < std::min(first + kBlocksAhead, blocks); b++) fetch(keys, b);
    if (!layer_->writes(step)) return;
    fetch(keys, blocks - 1);  // to be written
    fetch(cache.v_blocks(layer_->index, task.kv_head), blocks - 1);
  }

  AttentionTile pack_tile(const Step& step, const AttentionTask& task,
                          const AttentionScratch::Worker& scratch) const {
    const Layer& layer = *layer_;
    const KVCache& cache = *layer.cache;
    AttentionTile tile;
    tile.group = layer.shape.group;
    tile.heads = task.num_heads;
    tile.rows = task.num_tokens * tile.heads * tile.group;
    tile.head_dim = cache.head_dim;
    tile.position = step.positions[task.token];
    tile.window = layer.shape.window;
    tile.length = layer.shape.causal ? 0 : step.seq_lens[task.req];
    tile.softcap = layer.spec.softcap * 1.44269504088896341f;
    tile.q = scratch.q;
    tile.scores = scratch.scores;
    tile.k_blocks = cache.k_blocks(layer.index, task.kv_head);
    tile.v_blocks = cache.v_blocks(layer.index, task.kv_head);
    tile.places = cache.places();
    tile.block_ids = step.block_ids.data() + step.block_starts[task.req];
    const int first_head = task.kv_head * tile.group;
    const int heads = tile.heads * tile.group, width = heads * tile.head_dim;
    if (!layer.rope) {
      const float* q = layer.q->row(task.token) + first_head * tile.head_dim;
      cache.layout().pack_q(q, layer.q->width, tile.rows, heads, tile.head_dim, scratch.q);
      return tile;
    }
    for (int i = 0; i < task.num_tokens; i++) {
      layer.rope->queries(step, task.token + i, first_head, heads, scratch.out + i * width);
    }
    cache.layout().pack_q(scratch.out, width, tile.rows, heads, tile.head_dim, scratch.q);
    return tile;
  }

  void walk(const AttentionTile& tile, const AttentionTask& task,
            const AttentionScratch::Worker& scratch) const {
    const KVCache& cache = *layer_->cache;
    cache.layout().attend_segment(tile, task.segment_begin, scratch.total);
    for (int s = task.segment_begin + 1; s < task.segment_end; s++) {
      cache.layout().attend_segment(tile, s, scratch.segment);
      cache.kernels.merge(scratch.total, scratch.segment, tile.rows, tile.head_dim);
    }
  }

  std::shared_ptr<const Layer> layer_;
};

// Puts together what several tasks found in the segments of one tile.
class AttentionMerge final : public Op {
 public:
  explicit AttentionMerge(std::shared_ptr<const Layer> layer) : layer_(std::move(layer)) {}
  const char* name() const override { return "attention_merge"; }
  int num_chunks(const Step& step) const override {
    return static_cast<int>(attention_work(step, layer_->shape).merges.size());
  }
  void run(const Step& step, int chunk, Worker& worker) const override {
    const Layer& layer = *layer_;
    const AttentionTask& task = attention_work(step, layer.shape).merges[chunk];
    const int rows = task.num_tokens * task.num_heads * layer.shape.group;
    const AttentionPartial total = layer.scratch->partial(task.partial_row);
    for (int s = task.segment_begin + 1; s < task.segment_end; s++) {
      const int row = task.partial_row + (s - task.segment_begin) * rows;
      layer.cache->kernels.merge(total, layer.scratch->partial(row), rows, layer.cache->head_dim);
    }
    layer.finish(step, task, total, layer.scratch->worker(worker.index).out);
  }

 private:
  std::shared_ptr<const Layer> layer_;
};

// As many KV heads as fill a tile, all tasks the same number.
int heads_together(int num_kv_heads, int tile_tokens) {
  int heads = std::min(num_kv_heads, tile_tokens);
  while (num_kv_heads % heads != 0) heads--;
  return heads;
}

void check_arguments(const KernelTable& table, const KVCache& cache, int layer, const Rows* q, const Rope* rope,
                     const AttentionSpec& spec, const Rows* rows,
                     const std::vector<std::shared_ptr<ActBuffer>>& acts) {
  const int width = spec.num_heads * cache.head_dim;
  check(&cache.kernels == table.attention, "the cache was made for another instruction set");
  check(layer >= 0 && layer < cache.num_layers, "layer is outside the cache");
  check(spec.num_heads > 0 && spec.num_heads % cache.num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads");
  check((q == nullptr) != (rope == nullptr), "queries come from q or from rope");
  check(!rope || (&rope->cache() == &cache && rope->layer() == layer && rope->num_heads() == spec.num_heads),
        "rope belongs to another layer");
  check((!q || q->width == width) && (!rows || rows->width == width),
        "q or rows is not num_heads * head_dim wide");
  check(rows || !acts.empty(), "there is nothing to write to");
  for (const auto& act : acts) check(act->act().width == width, "an activation is not num_heads * head_dim wide");
  check(spec.sliding_window >= 0 && spec.softcap >= 0 && spec.num_threads > 0,
        "sliding_window, softcap or num_threads is out of range");
  check(spec.causal || spec.sliding_window == 0, "a window needs a causal mask");
  check(!rope || spec.queries == RowSet::Tokens || rope->may_sample(), "rope is for an attention of all tokens");
}

}  // namespace

void add_attention(Plan& plan, const KernelTable& table, std::shared_ptr<KVCache> cache, int layer,
                   std::shared_ptr<Rows> q, std::shared_ptr<const Rope> rope, const AttentionSpec& spec,
                   std::shared_ptr<Rows> rows, std::vector<std::shared_ptr<ActBuffer>> acts) {
  check_arguments(table, *cache, layer, q.get(), rope.get(), spec, rows.get(), acts);
  const int group = spec.num_heads / cache->num_kv_heads;
  const int tile_tokens = std::max(1, table.attention->tile_rows / group);
  auto ops = std::make_shared<Layer>();
  ops->index = layer;
  ops->q = q;
  ops->rope = std::move(rope);
  ops->spec = spec;
  ops->shape = {cache->num_kv_heads, heads_together(cache->num_kv_heads, tile_tokens), group,
                spec.sliding_window, tile_tokens, spec.num_threads, cache->num_blocks,
                AttentionScratch::kPartialRows, spec.causal, spec.queries};
  ops->scratch = cache->scratch(spec.num_threads, tile_tokens * group);
  // Where a tile's heads end within a group of 32, another tile would have to write the rest of it.
  const bool whole_groups = group * cache->head_dim % kGroup == 0;
  if (!whole_groups && !rows && !acts.empty()) {
    rows = std::make_shared<Rows>(acts[0]->act().width, q ? q->max_rows : ops->rope->max_rows());
  }
  ops->rows = rows;
  if (whole_groups) ops->acts = acts;
  ops->cache = std::move(cache);
  plan.add(std::make_unique<Attention>(ops));
  plan.add(std::make_unique<AttentionMerge>(ops));
  if (!whole_groups && !acts.empty()) {
    plan.add(make_put_rows(table, rows, spec.queries, std::move(acts)));
  }
}

}  // namespace twostep
