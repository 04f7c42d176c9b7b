// Activations as `linear` reads them: tile-major, in groups of 32 along K.
//
// Rows are cut into tiles of at most `max_rows` rows (as even as possible: 17 rows with
// max_rows 16 are 8 + 9, never 16 + 1). Row m lies in tile (r0, R); its group g has the index
//     slot = r0 * groups + g * R + (m - r0)
// and holds 32 consecutive values of K (zeros beyond `width`):
//     Q8:   q[slot * 32 ..], |q| <= 127, and scale[slot]: value = scale * q. What weights with a
//           minimum or a zero point need besides, so that no kernel adds up activations:
//           sum[slot] = scale * (sum of the 32 q), zero8[slot] = -8 * (sum of the 32 q),
//           zero128[slot] = -128 * (sum of the 32 q), zero8_low[slot] = -8 * (sum of the first 16 q)
//     BF16: bf16[slot * 32 ..]
//     F32:  f32[slot * 32 ..]
// Tile-major because rows of a row-major matrix with K = 4096 alias in the L1 sets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/memory.h"
#include "core/types.h"

namespace twostep {

inline constexpr int kGroup = 32;
// No kernel's tiles are higher.
inline constexpr int kMaxTileRows = 32;

struct Act {
  ActForm form = ActForm::F32;
  int width = 0;   // K
  int groups = 0;  // ceil(K / 32)
  int8_t* q = nullptr;
  float* scale = nullptr;
  float* sum = nullptr;
  int32_t* zero8 = nullptr;
  int32_t* zero128 = nullptr;
  int32_t* zero8_low = nullptr;
  uint16_t* bf16 = nullptr;
  float* f32 = nullptr;

  size_t slot(int r0, int rows, int m, int g) const {
    return static_cast<size_t>(r0) * groups + static_cast<size_t>(g) * rows + (m - r0);
  }
  // The same activations, seen from the tile that starts at row r0.
  Act from_row(int r0) const {
    const size_t slots = static_cast<size_t>(r0) * groups;
    Act a = *this;
    if (q) a.q += slots * kGroup;
    if (scale) a.scale += slots;
    if (sum) a.sum += slots;
    if (zero8) a.zero8 += slots;
    if (zero128) a.zero128 += slots;
    if (zero8_low) a.zero8_low += slots;
    if (bf16) a.bf16 += slots * kGroup;
    if (f32) a.f32 += slots * kGroup;
    return a;
  }
};

// An Act with memory of its own, for up to `max_rows` rows.
class ActBuffer {
 public:
  ActBuffer(ActForm form, int width, int max_rows);
  const Act& act() const { return act_; }
  size_t bytes() const { return memory_.bytes(); }

 private:
  Memory memory_;
  Act act_;
};

}  // namespace twostep
