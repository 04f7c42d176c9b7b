// Matrix products in AMX tiles. What tiles do not help (few rows of int8, the exact path) and the small
// kernels are those of AVX-512.
#include "isa/linear.h"

#include <cmath>

#include "isa/amx/tile.h"
#include "isa/avx512/linear_dot.h"
#include "isa/avx512/vec.h"

namespace twostep::avx512 {
extern const LinearKernels* const kLinearKernels;
}

namespace twostep::amx {
namespace {
using avx512::Dot;
using avx512::V;
#include "isa/act.inc"
#include "isa/avx512/act_rows.inc"
#include "isa/linear.inc"
#include "isa/linear_panel.inc"
#include "isa/linear_int8.inc"
#include "isa/amx/linear_int8.inc"

constexpr int kMaxRows = 16;
// Fewer are faster with vpdpbusd: a tile of sums costs its way through memory whatever its rows.
constexpr int kMinRows = 8;
// As many are paced by memory, which is fastest when read in one stream.
constexpr int kFewRows = 2;
#include "isa/amx/linear_bf16.inc"

template <Kind K>
struct Int8 {
  template <int R>
  static void rows(const PanelArgs& a) {
    if constexpr (R < kMinRows) {
      int8_panels<K, R>(a);
    } else {
      int8_tiles<K, R>(a);
    }
  }
  static void call(const PanelArgs& a) { for_rows<Int8, kMaxRows>(a); }
};

template <Kind K>
void exact(const PanelArgs& a) {
  avx512::kLinearKernels->panels[static_cast<int>(ActForm::F32)][static_cast<int>(K)](a);
}

const LinearKernels kTable{
    V::W,
    {kMaxRows, 2 * kTileRows, Dot::kFloatRows},
    ActForm::BF16,
    Kind::U8,
    {{Int8<Kind::U4>::call, Int8<Kind::U4M>::call, Int8<Kind::U4K>::call, Int8<Kind::U5>::call,
      Int8<Kind::U5M>::call, Int8<Kind::U5K>::call, Int8<Kind::U6K>::call, Int8<Kind::U8>::call,
      nullptr, nullptr, nullptr, nullptr},
     {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, bf16_tiles,
      nullptr, nullptr},
     {exact<Kind::U4>, exact<Kind::U4M>, exact<Kind::U4K>, exact<Kind::U5>, exact<Kind::U5M>,
      exact<Kind::U5K>, exact<Kind::U6K>, exact<Kind::U8>, nullptr, exact<Kind::BF16>,
      exact<Kind::F16>, exact<Kind::F32>}},
    gate,
    put_rows,
    add_scaled,
    scale_and_shift};
}  // namespace
extern const LinearKernels* const kLinearKernels;
const LinearKernels* const kLinearKernels = &kTable;
}  // namespace twostep::amx
