#include "isa/linear.h"

#include <cmath>

#include "isa/avx2/linear_dot.h"
#include "isa/avx2/vec.h"

namespace twostep::avx2 {
namespace {
#include "isa/act.inc"
#include "isa/act_rows.inc"
#include "isa/linear.inc"
#include "isa/linear_panel.inc"
#include "isa/linear_int8.inc"
#include "isa/linear_exact.inc"
#include "isa/avx2/linear_pairs.inc"

// 2 * 4 accumulators leave registers for expanding weights; with more they spill (measured).
constexpr int kExactRows = 4;

// From this many rows on, pairs of panels are faster (measured).
constexpr int kPairRows = 6;

template <Kind K>
struct Int8 {
  static void call(const PanelArgs& a) {
    if constexpr (info(K).bits == 4 || K == Kind::S8) {
      if (a.rows == 1) return int8_panels_of_one_row<K>(a);
    }
    if (a.rows == 1) return int8_panels<K, 1>(a);
    if constexpr (info(K).bits == 4) {
      if (a.rows >= kPairRows) return int8_pairs<K>(a);
    }
    int8_panels<K, 0>(a);
  }
};
template <Kind K>
struct Exact {
  template <int R>
  static void rows(const PanelArgs& a) {
    exact_panels<K, R>(a);
  }
  static void call(const PanelArgs& a) { for_rows<Exact, kExactRows>(a); }
};

const LinearKernels kTable{
    V::W,
    {Dot::kMaxRows, kExactRows, kExactRows},
    ActForm::F32,
    Kind::S8,
    {{Int8<Kind::U4>::call, Int8<Kind::U4M>::call, Int8<Kind::U4K>::call, Int8<Kind::U5>::call,
      Int8<Kind::U5M>::call, Int8<Kind::U5K>::call, Int8<Kind::U6K>::call, nullptr,
      Int8<Kind::S8>::call, nullptr, nullptr, nullptr},
     {},
     {Exact<Kind::U4>::call, Exact<Kind::U4M>::call, Exact<Kind::U4K>::call, Exact<Kind::U5>::call,
      Exact<Kind::U5M>::call, Exact<Kind::U5K>::call, Exact<Kind::U6K>::call, nullptr,
      Exact<Kind::S8>::call, Exact<Kind::BF16>::call, Exact<Kind::F16>::call, Exact<Kind::F32>::call}},
    gate,
    put_rows,
    add_scaled,
    scale_and_shift};
}  // namespace
extern const LinearKernels* const kLinearKernels;
const LinearKernels* const kLinearKernels = &kTable;
}  // namespace twostep::avx2
