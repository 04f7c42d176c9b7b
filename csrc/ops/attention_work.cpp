#include "ops/attention_work.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa/attention.h"

namespace twostep {

namespace {

// Tasks a thread should find, so that an uneven end costs little.
constexpr int kTasksPerThread = 4;
// Where the longest is shorter than a thread's share by this, the order matters little to how they end.
constexpr int kShortTasksPerThread = 16;

struct Tile {
  int req, token, row, num_tokens;
  AttentionSpan span;
  int64_t cost;  // of one KV head: rows * positions

  int segments() const { return span.segment_end - span.segment_begin; }
};

void check_blocks(const Step& step, const AttentionShape& shape) {
  for (int r = 0; r < step.num_reqs; r++) {
    const int blocks = (step.seq_lens[r] + kBlockSize - 1) / kBlockSize;
    if (step.block_starts[r + 1] - step.block_starts[r] != blocks) {
      throw std::invalid_argument("attention: the step's block table is not of blocks of " +
                                  std::to_string(kBlockSize) + " tokens");
    }
  }
  for (const int32_t id : step.block_ids) {
    if (id < 0 || id >= shape.num_blocks) {
      throw std::invalid_argument("attention: block id " + std::to_string(id) +
                                  " is outside the cache of " + std::to_string(shape.num_blocks) +
                                  " blocks");
    }
  }
}

void check_whole_texts(const Step& step) {
  for (int r = 0; r < step.num_reqs; r++) {
    if (step.query_start_loc[r + 1] - step.query_start_loc[r] != step.seq_lens[r]) {
      throw std::invalid_argument("attention: without a causal mask a text must be in one step, but " +
                                  std::to_string(step.seq_lens[r]) + " tokens are not");
    }
  }
}

// How many logits rows from s on, at most `most`, are tokens of one request that follow each other.
int sampled_run(const Step& step, int s, int most) {
  int count = 1;
  while (count < most && s + count < step.num_logits && step.logits_reqs[s + count] == step.logits_reqs[s] &&
         step.logits_indices[s + count] == step.logits_indices[s] + count) {
    count++;
  }
  return count;
}

std::vector<Tile> cut_tiles(const Step& step, const AttentionShape& shape) {
  std::vector<Tile> tiles;
  const auto add = [&](int req, int token, int row, int num_tokens) {
    const AttentionSpan span = tile_span(step, shape, req, token, num_tokens);
    tiles.push_back({req, token, row, num_tokens, span, int64_t{num_tokens} * shape.group * span.positions});
  };
  if (shape.queries == RowSet::Logits) {
    for (int s = 0, count; s < step.num_logits; s += count) {
      count = sampled_run(step, s, shape.tile_tokens);
      add(step.logits_reqs[s], step.logits_indices[s], s, count);
    }
    return tiles;
  }
  for (int r = 0; r < step.num_reqs; r++) {
    const int end = step.query_start_loc[r + 1];
    for (int t = step.query_start_loc[r]; t < end; t += shape.tile_tokens) {
      add(r, t, t, std::min(shape.tile_tokens, end - t));
    }
  }
  return tiles;
}

// Those of a token alone go together, as they lie in memory, where there are tasks enough without them.
int heads_of_task(const AttentionShape& shape, const Tile& tile, int64_t target) {
  const int64_t cost_of_segment = tile.cost * shape.heads_together / tile.segments();
  return tile.num_tokens == 1 && cost_of_segment <= target ? shape.heads_together : 1;
}

// The tasks of KV heads h .. h + num_heads - 1, in as many parts as it takes to bring each down to `target`
// cost.
void add_tasks(AttentionWork& work, const Tile& tile, int h, int num_heads, int64_t target, int& free_row) {
  const AttentionShape& shape = work.shape;
  const int rows = tile.num_tokens * num_heads * shape.group, segments = tile.segments();
  const int rows_needed = rows * segments;
  const int64_t cost = tile.cost * num_heads;
  int parts = static_cast<int>(std::min<int64_t>((cost + target - 1) / target, segments));
  if (shape.num_threads == 1 || free_row + rows_needed > shape.partial_rows) parts = 1;
  AttentionTask task{tile.req, tile.token, tile.row, tile.num_tokens, h, num_heads,
                     tile.span.segment_begin, tile.span.segment_end, -1, cost};
  if (parts == 1) {
    work.tasks.push_back(task);
    return;
  }
  task.partial_row = free_row;
  free_row += rows_needed;
  work.merges.push_back(task);
  task.cost /= parts;
  for (int p = 0; p < parts; p++) {
    task.segment_begin = tile.span.segment_begin + segments * p / parts;
    task.segment_end = tile.span.segment_begin + segments * (p + 1) / parts;
    work.tasks.push_back(task);
  }
}

// Worker w gets the runs w and 2 n - 1 - w of 2 n: of a prompt, whose later tokens see more, a short and a long one.
// Neighbours stay neighbours: the activations of their tokens share lines, and so do those of all the ops around.
void fold(std::vector<AttentionTask>& tasks, int num_threads) {
  const auto n = static_cast<std::ptrdiff_t>(tasks.size());
  const int runs = 2 * num_threads;
  std::vector<AttentionTask> folded;
  folded.reserve(tasks.size());
  for (int w = 0; w < num_threads; w++) {
    for (const int run : {w, runs - 1 - w}) {
      folded.insert(folded.end(), tasks.begin() + n * run / runs, tasks.begin() + n * (run + 1) / runs);
    }
  }
  tasks = std::move(folded);
}

// The longest first, dealt out so that each worker's range (see Stream) has its share of them.
void deal(std::vector<AttentionTask>& tasks, int num_threads) {
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  if (num_threads == 1) return;
  const auto n = static_cast<int64_t>(tasks.size());
  std::vector<AttentionTask> dealt(tasks.size());
  std::vector<int64_t> next(num_threads);
  for (int w = 0; w < num_threads; w++) next[w] = n * w / num_threads;
  int w = 0;
  for (const AttentionTask& task : tasks) {
    while (next[w] == n * (w + 1) / num_threads) w = (w + 1) % num_threads;
    dealt[next[w]++] = task;
    w = (w + 1) % num_threads;
  }
  tasks = std::move(dealt);
}

// Puts the tasks, `total` their cost, in an order that lets the threads end together.
void arrange(std::vector<AttentionTask>& tasks, int64_t total, int num_threads) {
  const auto [least, most] = std::minmax_element(
      tasks.begin(), tasks.end(),
      [](const AttentionTask& a, const AttentionTask& b) { return a.cost < b.cost; });
  if (tasks.empty() || most->cost <= 2 * least->cost) return;
  if (most->cost * num_threads * kShortTasksPerThread <= total) {
    fold(tasks, num_threads);
  } else {
    deal(tasks, num_threads);
  }
}

std::shared_ptr<AttentionWork> make_work(const Step& step, const AttentionShape& shape) {
  check_blocks(step, shape);
  if (!shape.causal) check_whole_texts(step);
  auto work = std::make_shared<AttentionWork>();
  work->shape = shape;
  const std::vector<Tile> tiles = cut_tiles(step, shape);
  int64_t total = 0;
  for (const Tile& tile : tiles) total += tile.cost * shape.num_kv_heads;
  const int64_t target = std::max<int64_t>(total / (shape.num_threads * kTasksPerThread), 1);
  int free_row = 0;
  for (const Tile& tile : tiles) {
    const int num_heads = heads_of_task(shape, tile, target);
    for (int h = 0; h < shape.num_kv_heads; h += num_heads) {
      add_tasks(*work, tile, h, num_heads, target, free_row);
    }
  }
  arrange(work->tasks, total, shape.num_threads);
  return work;
}

const AttentionWork* find_work(const Step& step, const AttentionShape& shape) {
  const AttentionWork* work = step.newest_attention_work.load(std::memory_order_acquire);
  while (work && !(work->shape == shape)) work = work->before;
  return work;
}

}  // namespace

AttentionSpan attention_span(int position, int num_tokens, int window) {
  const int first = window > 0 ? std::max(0, position - window + 1) : 0;
  const int end = position + num_tokens;
  return {first / kSegment, (end - 1) / kSegment + 1, end - first};
}

AttentionSpan tile_span(const Step& step, const AttentionShape& shape, int req, int token,
                        int num_tokens) {
  if (!shape.causal) return attention_span(0, step.seq_lens[req], 0);
  return attention_span(step.positions[token], num_tokens, shape.window);
}

const AttentionWork& attention_work(const Step& step, const AttentionShape& shape) {
  // Every task of every layer comes by, on all threads: a lock's line would go from core to core each time.
  if (const AttentionWork* work = find_work(step, shape)) return *work;
  std::lock_guard lock(step.attention_mutex);
  if (const AttentionWork* work = find_work(step, shape)) return *work;
  auto work = make_work(step, shape);
  work->before = step.newest_attention_work.load(std::memory_order_relaxed);
  step.attention_work.push_back(work);
  step.newest_attention_work.store(work.get(), std::memory_order_release);
  return *work;
}

}  // namespace twostep
