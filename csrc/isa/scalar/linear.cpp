#include "isa/linear.h"

#include <cmath>

#include "isa/scalar/linear_dot.h"
#include "isa/scalar/vec.h"

namespace twostep::scalar {
namespace {
#include "isa/act.inc"
#include "isa/act_rows.inc"
#include "isa/linear.inc"
#include "isa/linear_panel.inc"
#include "isa/linear_int8.inc"
#include "isa/linear_exact.inc"

constexpr int kExactRows = 4;

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
    Kind::U8,
    {{int8_panels<Kind::U4, 0>, int8_panels<Kind::U4M, 0>, int8_panels<Kind::U4K, 0>,
      int8_panels<Kind::U5, 0>, int8_panels<Kind::U5M, 0>, int8_panels<Kind::U5K, 0>,
      int8_panels<Kind::U6K, 0>, int8_panels<Kind::U8, 0>, nullptr, nullptr, nullptr, nullptr},
     {},
     {Exact<Kind::U4>::call, Exact<Kind::U4M>::call, Exact<Kind::U4K>::call, Exact<Kind::U5>::call,
      Exact<Kind::U5M>::call, Exact<Kind::U5K>::call, Exact<Kind::U6K>::call, Exact<Kind::U8>::call,
      nullptr, Exact<Kind::BF16>::call, Exact<Kind::F16>::call, Exact<Kind::F32>::call}},
    gate,
    put_rows,
    add_scaled,
    scale_and_shift};
}  // namespace
extern const LinearKernels* const kLinearKernels;
const LinearKernels* const kLinearKernels = &kTable;
}  // namespace twostep::scalar
