#include "isa/linear.h"

#include <cmath>

#include "isa/neon/linear_dot.h"
#include "isa/neon/vec.h"

namespace twostep::neon {
namespace {
#include "isa/act.inc"
#include "isa/act_rows.inc"
#include "isa/linear.inc"
#include "isa/linear_panel.inc"
#include "isa/linear_int8.inc"
#include "isa/linear_exact.inc"

// 2 * 4 sums of two registers each leave sixteen for expanding weights.
constexpr int kExactRows = 4;

template <Kind K>
struct Int8 {
  static void call(const PanelArgs& a) {
    if (a.rows == 1) return int8_panels<K, 1>(a);
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
}  // namespace twostep::neon
