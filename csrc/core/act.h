// Activations as `linear` reads them: tile-major, in groups of 32 along K.
//
// Rows are cut into tiles of at most `max_rows` rows (as even as possible: 17 rows with
// max_rows 16 are 8 + 9, never 16 + 1). Row m lies in tile (r0, R); its group g has the index
//     slot = r0 * groups + g * R + (m - r0)
// and holds 32 consecutive values of K (zeros beyond `width`):
//     Q8:   q[slot * 32 ..], scale[slot] (value = scale * q), isum[slot] = sum of the 32 q
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

struct Act {
  ActForm form = ActForm::F32;
  int width = 0;   // K
  int groups = 0;  // ceil(K / 32)
  int8_t* q = nullptr;
  float* scale = nullptr;
  int32_t* isum = nullptr;
  uint16_t* bf16 = nullptr;
  float* f32 = nullptr;

  size_t slot(int r0, int rows, int m, int g) const {
    return static_cast<size_t>(r0) * groups + static_cast<size_t>(g) * rows + (m - r0);
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
