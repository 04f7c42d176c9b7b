#include "isa/linear.h"

#include <cmath>

#include "isa/avx512/linear_dot.h"
#include "isa/avx512/vec.h"

namespace twostep::avx512 {
namespace {
#include "isa/act.inc"
#include "isa/avx512/act_rows.inc"
#include "isa/linear.inc"
#include "isa/linear_panel.inc"
#include "isa/linear_int8.inc"
#include "isa/avx512/linear_pairs.inc"
#include "isa/linear_exact.inc"
#include "isa/linear_bf16.inc"

template <Kind K>
struct Int8 {
  template <int R>
  static void rows(const PanelArgs& a) {
    // Three rows of two panels are six chains, too few for the latency; kinds with halves have two sums for each.
    if constexpr (!info(K).halves && R >= 4) {
      if (a.in_cache) return int8_pairs<K, R>(a);
    }
    int8_panels<K, R>(a);
  }
  static void call(const PanelArgs& a) { for_rows<Int8, Dot::kMaxRows>(a); }
};
template <Kind K>
struct Exact {
  template <int R>
  static void rows(const PanelArgs& a) {
    exact_panels<K, R>(a);
  }
  static void call(const PanelArgs& a) { for_rows<Exact, Dot::kFloatRows>(a); }
};
struct BF16 {
  template <int R>
  static void rows(const PanelArgs& a) {
    bf16_panels<R>(a);
  }
  static void call(const PanelArgs& a) { for_rows<BF16, Dot::kFloatRows>(a); }
};

const LinearKernels kTable{
    V::W,
    {Dot::kMaxRows, Dot::kFloatRows, Dot::kFloatRows},
    ActForm::BF16,
    Kind::U8,
    {{Int8<Kind::U4>::call, Int8<Kind::U4M>::call, Int8<Kind::U4K>::call, Int8<Kind::U5>::call,
      Int8<Kind::U5M>::call, Int8<Kind::U5K>::call, Int8<Kind::U6K>::call, Int8<Kind::U8>::call,
      nullptr, nullptr, nullptr, nullptr},
     {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, BF16::call,
      nullptr, nullptr},
     {Exact<Kind::U4>::call, Exact<Kind::U4M>::call, Exact<Kind::U4K>::call, Exact<Kind::U5>::call,
      Exact<Kind::U5M>::call, Exact<Kind::U5K>::call, Exact<Kind::U6K>::call, Exact<Kind::U8>::call,
      nullptr, Exact<Kind::BF16>::call, Exact<Kind::F16>::call, Exact<Kind::F32>::call}},
    gate,
    put_rows,
    add_scaled,
    scale_and_shift,
    false,
    {false, true, false}};
}  // namespace
extern const LinearKernels* const kLinearKernels;
const LinearKernels* const kLinearKernels = &kTable;
}  // namespace twostep::avx512
