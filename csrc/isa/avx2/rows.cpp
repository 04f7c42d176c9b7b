#include "isa/rows.h"

#include <cmath>

#include "isa/avx2/vec.h"

namespace twostep::avx2 {
namespace {
#include "isa/act.inc"
#include "isa/act_rows.inc"
#include "isa/rows.inc"
}  // namespace
extern const RowKernels* const kRowKernels;
const RowKernels* const kRowKernels = &kTable;
}  // namespace twostep::avx2
