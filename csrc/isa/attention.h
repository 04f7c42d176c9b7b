// Kernels of paged attention: rotate q and k, write a token's KV, attend one segment, merge.
//
// The KV of one layer is two pools, K and V, of blocks of 16 tokens; where its blocks lie is said by
// KVPlaces. How the block of one KV head lies in memory is the instruction set's choice
// (isa/attention_plain.inc, isa/avx512/attention_pairs.inc); it has head_dim * 16 elements.
//
// The context of a query row is cut at multiples of kSegment positions. One segment gives the row a
// partial result (its scores' maximum, sum of exponentials and weighted sum of V); partials are
// merged in order of position. This is the whole arithmetic, whether one thread walks all segments
// or several take some each, so a row's result depends on its own position and context only.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/act.h"
#include "core/types.h"

namespace twostep {

inline constexpr int kBlockSize = 16;  // tokens of a KV block
inline constexpr int kSegment = 256;   // positions
// Floats between two rows of scores: rows are not a multiple of 4096 bytes apart in the L1.
inline constexpr int kScoreStride = kSegment + 16;

// Where the blocks of a pool lie: those whose ids differ in the last bits only are neighbours, and the KV
// heads of one block lie side by side.
inline constexpr uint32_t kNeighbours = 32;
struct KVPlaces {
  size_t head_bytes;   // of one KV head's block
  size_t block_bytes;  // of all heads: between neighbours
  size_t stride;       // between block 0 and block kNeighbours
  size_t of(int32_t id) const {
    const auto i = static_cast<uint32_t>(id);
    return i / kNeighbours * stride + i % kNeighbours * block_bytes;
  }
};

struct RopeArgs {
  const float* cos;  // [rotary_dim / 2], of this position
  const float* sin;
  int rotary_dim;    // even, at most head_dim; dimensions behind pass unchanged
  int head_dim;
  bool interleaved;  // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  float scale;       // multiplies all of head_dim: query_scale for q, 1 for k
};

// What some rows saw of one segment, or of all so far. A row with sum == 0 saw nothing, and its
// `out` holds nothing.
struct AttentionPartial {
  float* max;  // [rows], in units of log2
  float* sum;  // [rows]
  float* out;  // [rows, head_dim], not yet divided by sum
};

// Blocks lie anywhere, and the processor's own prefetch ends where a run of neighbours does: kernels ask for
// the block that is this far ahead, line by line as they read the one at hand (all lines at once take the
// buffers that loads wait in), into the L2 cache (hints for the L1 hold up loads).
inline constexpr int kBlocksAhead = 2;
inline void fetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }

// A block's keys of one KV head, and the block to fetch meanwhile.
template <class Element>
struct Keys {
  const Element* k;
  const Element* ahead;
};

// Query rows that are computed together, of consecutive tokens of one request, the first at `position`:
// each with the `group` query heads that share a KV head, or one token with those of several KV heads.
struct AttentionTile {
  int rows;                  // tokens * heads * group
  int group;
  int heads;                 // KV heads; more than one with one token only
  int head_dim;
  int position;
  int window;                // a query at p sees p - window + 1 .. p; 0: everything up to p
  float softcap;             // in units of log2: cap * log2(e); 0: none
  const void* q;             // packed by pack_q
  float* scores;             // scratch [rows, kScoreStride]
  const void* k_blocks;      // pool of this layer, at the first of the KV heads
  const void* v_blocks;
  KVPlaces places;
  const int32_t* block_ids;  // of the request, by position / 16
  int length = 0;            // above 0: no causal mask, every query sees positions 0 .. length - 1

  const void* k_block(int b) const { return block(k_blocks, b); }
  const void* v_block(int b) const { return block(v_blocks, b); }
  // The token that row r belongs to, and the rows of one KV head.
  int token(int r) const { return heads > 1 ? 0 : r / group; }
  int rows_of_head() const { return rows / heads; }

 private:
  const void* block(const void* pool, int b) const {
    return static_cast<const char*>(pool) + places.of(block_ids[b]);
  }
};

// begin .. end - 1
struct Range {
  int begin, end;
};

// The kernels of one KV data type.
struct AttentionLayout {
  size_t element_bytes;
  // One token's k and v [head_dim] into its place in a block.
  void (*write_token)(const float* k, const float* v, int head_dim, void* k_block, void* v_block,
                      int offset);
  // q: the tile's rows, row r at q + (r / group) * token_stride + (r % group) * head_dim.
  // `packed` has room for rows * head_dim floats.
  void (*pack_q)(const float* q, size_t token_stride, int rows, int group, int head_dim,
                 void* packed);
  // Segment s covers positions s * kSegment .. (s + 1) * kSegment - 1.
  void (*attend_segment)(const AttentionTile&, int segment, const AttentionPartial&);
};

struct AttentionKernels {
  KVType default_kv_type;
  int tile_rows;              // rows of a tile (more only where `group` is larger)
  AttentionLayout layout[3];  // by KVType
  // Heads that lie behind each other; y may be x.
  void (*rope)(const float* x, const RopeArgs&, int heads, float* y);
  // into = into merged with the partials of the positions behind it.
  void (*merge)(const AttentionPartial& into, const AttentionPartial& from, int rows, int head_dim);
  // y[rows, head_dim] = out / sum
  void (*finish)(const AttentionPartial&, int rows, int head_dim, float* y);
  // `num_groups` groups of 32 from x into row m of an activation, the first as group g.
  void (*put_groups)(const float* x, int g, int num_groups, const Act&, int r0, int rows, int m);
};

// What q is multiplied by, so that scores come out in the unit that the softmax works in: powers
// of two, or with a soft cap the argument that turns into tanh.
inline float query_scale(float scale, float softcap) {
  constexpr float kLog2e = 1.44269504088896341f;
  return softcap > 0 ? 2 * scale * kLog2e / softcap : scale * kLog2e;
}

}  // namespace twostep
