// Attention over bf16 KV in AMX tiles; the other types, and what is not a product, are AVX-512's.
#include "isa/attention.h"

#include <cmath>
#include <cstring>

#include "isa/amx/tile.h"
#include "isa/avx512/vec.h"

namespace twostep::avx512 {
extern const AttentionKernels* const kAttentionKernels;
}

namespace twostep::amx {
namespace {
using avx512::V;

#define TWOSTEP_INLINE static inline __attribute__((always_inline))
constexpr int kMicroRows = 12;
#include "isa/act.inc"
#include "isa/avx512/rotate.inc"
#include "isa/avx512/attention_pairs.inc"
#include "isa/attention.inc"
#include "isa/amx/attention_tiles.inc"

template <KVType type>
struct AsAvx512 {
  static const AttentionLayout& layout() {
    return avx512::kAttentionKernels->layout[static_cast<int>(type)];
  }
  static void write_token(const float* k, const float* v, int head_dim, void* k_block, void* v_block,
                          int offset) {
    layout().write_token(k, v, head_dim, k_block, v_block, offset);
  }
  static void pack_q(const float* q, size_t token_stride, int rows, int group, int head_dim,
                     void* packed) {
    layout().pack_q(q, token_stride, rows, group, head_dim, packed);
  }
  static void attend_segment(const AttentionTile& t, int segment, const AttentionPartial& part) {
    layout().attend_segment(t, segment, part);
  }
  static constexpr AttentionLayout of(size_t element_bytes) {
    return {element_bytes, write_token, pack_q, attend_segment};
  }
};

const AttentionKernels kTable{
    KVType::BF16,
    kTileRows,
    {layout_of<TilePairs>(), AsAvx512<KVType::F16>::of(2), AsAvx512<KVType::F32>::of(4)},
    rope,
    merge,
    finish,
    put_groups,
};

}  // namespace
extern const AttentionKernels* const kAttentionKernels;
const AttentionKernels* const kAttentionKernels = &kTable;
}  // namespace twostep::amx
