#include "ops/attention_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace twostep {

namespace {

constexpr size_t kAlign = 64;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Hands out parts of a Memory one after the other.
class Carver {
 public:
  explicit Carver(char* at) : at_(at) {}
  float* floats(size_t n) {
    char* p = at_;
    at_ += aligned(n * sizeof(float));
    return reinterpret_cast<float*>(p);
  }
  AttentionPartial partial(size_t rows, size_t head_dim) {
    AttentionPartial p;
    p.max = floats(rows);
    p.sum = floats(rows);
    p.out = floats(rows * head_dim);
    return p;
  }

 private:
  char* at_;
};

size_t partial_bytes(size_t rows, size_t head_dim) {
  return 2 * aligned(rows * sizeof(float)) + aligned(rows * head_dim * sizeof(float));
}

size_t worker_bytes(size_t rows, size_t head_dim) {
  return aligned(rows * kScoreStride * sizeof(float)) + 2 * aligned(rows * head_dim * sizeof(float)) +
         2 * partial_bytes(rows, head_dim);
}

int checked_positive(int value, const char* what) {
  if (value < 1) throw std::invalid_argument(std::string("KV cache: ") + what + " must be at least 1");
  return value;
}

}  // namespace

AttentionScratch::AttentionScratch(int num_threads_, int tile_rows_, int head_dim_)
    : num_threads(num_threads_),
      tile_rows(tile_rows_),
      head_dim(head_dim_),
      memory_(worker_bytes(tile_rows_, head_dim_) * num_threads_ +
              partial_bytes(kPartialRows, head_dim_)) {
  Carver carver(memory_.as<char>());
  for (int i = 0; i < num_threads; i++) {
    Worker w;
    w.q = carver.floats(static_cast<size_t>(tile_rows) * head_dim);
    w.scores = carver.floats(static_cast<size_t>(tile_rows) * kScoreStride);
    w.segment = carver.partial(tile_rows, head_dim);
    w.total = carver.partial(tile_rows, head_dim);
    w.out = carver.floats(static_cast<size_t>(tile_rows) * head_dim);
    workers_.push_back(w);
  }
  partials_ = carver.partial(kPartialRows, head_dim);
}

AttentionPartial AttentionScratch::partial(int first) const {
  return {partials_.max + first, partials_.sum + first,
          partials_.out + static_cast<size_t>(first) * head_dim};
}

KVCache::KVCache(const KernelTable& table, int num_layers_, int num_kv_heads_, int head_dim_,
                 int num_blocks_, int block_size, KVType type_)
    : kernels(*table.attention),
      num_layers(checked_positive(num_layers_, "num_layers")),
      num_kv_heads(checked_positive(num_kv_heads_, "num_kv_heads")),
      head_dim(checked_positive(head_dim_, "head_dim")),
      num_blocks(checked_positive(num_blocks_, "num_blocks")),
      type(type_) {
  if (block_size != kBlockSize) {
    throw std::invalid_argument("KV cache: block_size is " + std::to_string(block_size) +
                                ", the kernels need " + std::to_string(kBlockSize));
  }
  if (head_dim % 16 != 0) {
    throw std::invalid_argument("KV cache: head_dim is " + std::to_string(head_dim) +
                                ", the kernels need a multiple of 16");
  }
  const size_t head = static_cast<size_t>(kBlockSize) * head_dim * layout().element_bytes;
  const size_t block = head * num_kv_heads;
  places_ = {head, block, block * kNeighbours * 2 * num_layers};
  memory_.emplace((num_blocks + kNeighbours - 1) / kNeighbours * places_.stride);
}

void KVCache::expect(const std::vector<int32_t>& block_ids) {
  if (block_ids.empty()) return;
  const int32_t highest = *std::max_element(block_ids.begin(), block_ids.end());
  const size_t end = (static_cast<size_t>(highest) / kNeighbours + 1) * places_.stride;
  if (end > used_.load(std::memory_order_relaxed)) used_.store(end, std::memory_order_relaxed);
}

bool KVCache::touch_ahead() {
  const size_t used = used_.load(std::memory_order_relaxed);
  return memory_->take(used + std::clamp(used, kLeastAhead, kMostAhead));
}

std::shared_ptr<const AttentionScratch> KVCache::scratch(int num_threads, int tile_rows) {
  std::lock_guard lock(mutex_);
  for (const auto& s : scratch_) {
    if (s->num_threads == num_threads && s->tile_rows == tile_rows) return s;
  }
  scratch_.push_back(std::make_shared<AttentionScratch>(num_threads, tile_rows, head_dim));
  return scratch_.back();
}

RopeTable::RopeTable(const float* cos_, const float* sin_, int max_position_, int half_)
    : max_position(max_position_), half(half_) {
  const size_t n = static_cast<size_t>(max_position) * half;
  memory = Memory(2 * n * sizeof(float) + kAlign);
  cos = memory.as<float>();
  sin = cos + n;
  std::memcpy(cos, cos_, n * sizeof(float));
  std::memcpy(sin, sin_, n * sizeof(float));
}

}  // namespace twostep
