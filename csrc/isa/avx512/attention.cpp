#include "isa/attention.h"

#include <cmath>

#include "isa/avx512/vec.h"

namespace twostep::avx512 {
namespace {

constexpr int kMicroRows = 12;  // query rows kept in registers
constexpr int kAccumulators = 24;
constexpr int kTileRows = 12;

// The first n / 2 floats, at most 8, each twice.
inline V::F load_twice(const float* p, int n) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  return _mm512_permutexvar_ps(twice, V::load_n(p, n < V::W ? n / 2 : V::W / 2));
}

// Lane 2i and 2i + 1 are a pair; n lanes matter.
inline V::F rotate_pairs(V::F x, const float* cos, const float* sin, int n) {
  const V::F swapped = _mm512_permute_ps(x, 0xb1);
  const V::F a = V::mul(x, load_twice(cos, n)), b = V::mul(swapped, load_twice(sin, n));
  return _mm512_mask_sub_ps(V::add(a, b), 0x5555, a, b);
}

#include "isa/act.inc"
#include "isa/attention_plain.inc"
#include "isa/avx512/attention_pairs.inc"
#include "isa/attention.inc"

const AttentionKernels kTable{
    KVType::BF16,
    kTileRows,
    {layout_of<Pairs>(), layout_of<Plain<ElementF16>>(), layout_of<Plain<ElementF32>>()},
    rope,
    merge,
    finish,
    put_groups,
};

}  // namespace
extern const AttentionKernels* const kAttentionKernels;
const AttentionKernels* const kAttentionKernels = &kTable;
}  // namespace twostep::avx512
