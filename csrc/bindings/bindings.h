// The Python face of the native library: checks arguments, holds no logic.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa/kernels.h"
#include "plan/plan.h"
#include "plan/step.h"
#include "plan/token_table.h"

namespace twostep {

namespace nb = nanobind;

// Read-only, C-contiguous numpy arrays.
using Int32Array = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32Matrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The kernels in use: what every recorded op is made with.
struct Device {
  CpuInfo info;
  const KernelTable* table;
  int max_tile_rows[kNumActForms];
};

void bind_core(nb::module_& m);
void bind_peak(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sample(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_strings(nb::module_& m);

}  // namespace twostep
