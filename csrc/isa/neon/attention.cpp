#include "isa/attention.h"

#include <cmath>

#include "isa/neon/vec.h"

namespace twostep::neon {
namespace {

constexpr int kMicroRows = 6;  // query rows kept in registers: four registers each
constexpr int kAccumulators = 12;
constexpr int kTileRows = 12;

// The first n / 2 floats, at most 4, each twice.
inline V::F load_twice(const float* p, int n) {
  const float32x4_t x = n < V::W ? V::load_n(p, n / 2).lo : vld1q_f32(p);
  return {vzip1q_f32(x, x), vzip2q_f32(x, x)};
}

// Lane 2i and 2i + 1 are a pair.
inline V::F rotate_pairs(V::F x, V::F cos, V::F sin) {
  const uint32x4_t even = vreinterpretq_u32_u64(vdupq_n_u64(0x80000000u));  // sign bits
  const V::F swapped{vrev64q_f32(x.lo), vrev64q_f32(x.hi)};
  const V::F signed_sin = V::as_floats({veorq_u32(vreinterpretq_u32_f32(sin.lo), even),
                                        veorq_u32(vreinterpretq_u32_f32(sin.hi), even)});
  return V::add(V::mul(x, cos), V::mul(swapped, signed_sin));
}

#include "isa/act.inc"
#include "isa/attention_plain.inc"
#include "isa/attention.inc"

const AttentionKernels kTable{
    KVType::BF16,  // a shift widens it; FCVTL takes twice as long on Neoverse N1
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
}  // namespace twostep::neon
