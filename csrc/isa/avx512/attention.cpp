#include "isa/attention.h"

#include <cmath>

#include "isa/avx512/vec.h"

namespace twostep::avx512 {
namespace {

constexpr int kMicroRows = 12;  // query rows kept in registers
constexpr int kAccumulators = 24;
constexpr int kTileRows = 12;

#include "isa/avx512/rotate.inc"
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
