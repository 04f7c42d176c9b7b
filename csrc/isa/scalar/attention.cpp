#include "isa/attention.h"

#include <cmath>

#include "isa/scalar/vec.h"

namespace twostep::scalar {
namespace {

constexpr int kMicroRows = 4;  // query rows kept in registers
constexpr int kAccumulators = 16;
constexpr int kTileRows = 8;

// Lane 2i and 2i + 1 are a pair; n lanes matter.
inline V::F rotate_pairs(V::F x, const float* cos, const float* sin, int n) {
  V::F y = x;
  for (int i = 0; i < V::W && i < n; i += 2) {
    y.v[i] = x.v[i] * cos[i / 2] - x.v[i + 1] * sin[i / 2];
    y.v[i + 1] = x.v[i + 1] * cos[i / 2] + x.v[i] * sin[i / 2];
  }
  return y;
}

#include "isa/act.inc"
#include "isa/attention_plain.inc"
#include "isa/attention.inc"

const AttentionKernels kTable{
    KVType::BF16,
    kTileRows,
    {layout_of<Plain<ElementBF16>>(), layout_of<Plain<ElementF16>>(), layout_of<Plain<ElementF32>>()},
    rope,
    merge,
    finish,
    put_groups,
};

}  // namespace
extern const AttentionKernels* const kAttentionKernels;
const AttentionKernels* const kAttentionKernels = &kTable;
}  // namespace twostep::scalar
