#include "isa/attention.h"

#include <cmath>

#include "isa/scalar/vec.h"

namespace twostep::scalar {
namespace {

constexpr int kMicroRows = 4;  // query rows kept in registers
constexpr int kAccumulators = 16;
constexpr int kTileRows = 8;

// The first n / 2 floats, each twice.
inline V::F load_twice(const float* p, int n) {
  V::F y = V::zero();
  for (int i = 0; i < V::W && i < n; i++) y.v[i] = p[i / 2];
  return y;
}

// Lane 2i and 2i + 1 are a pair.
inline V::F rotate_pairs(V::F x, V::F cos, V::F sin) {
  V::F y = x;
  for (int i = 0; i < V::W; i += 2) {
    y.v[i] = x.v[i] * cos.v[i] - x.v[i + 1] * sin.v[i];
    y.v[i + 1] = x.v[i + 1] * cos.v[i] + x.v[i] * sin.v[i];
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
