#include "isa/attention.h"

#include <cmath>

#include "isa/avx2/vec.h"

namespace twostep::avx2 {
namespace {

constexpr int kMicroRows = 6;  // query rows kept in registers
constexpr int kAccumulators = 12;
constexpr int kTileRows = 12;

// The first n / 2 floats, at most 4, each twice.
inline V::F load_twice(const float* p, int n) {
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const V::F x = n < V::W ? V::load_n(p, n / 2) : _mm256_castps128_ps256(_mm_loadu_ps(p));
  return _mm256_permutevar8x32_ps(x, twice);
}

// Lane 2i and 2i + 1 are a pair.
inline V::F rotate_pairs(V::F x, V::F cos, V::F sin) {
  return _mm256_addsub_ps(V::mul(x, cos), V::mul(_mm256_permute_ps(x, 0xb1), sin));
}

#include "isa/act.inc"
#include "isa/attention_plain.inc"
#include "isa/attention.inc"

const AttentionKernels kTable{
    KVType::F16,
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
}  // namespace twostep::avx2
