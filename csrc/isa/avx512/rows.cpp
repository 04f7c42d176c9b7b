#include "isa/rows.h"

#include <cmath>

#include "isa/avx512/vec.h"

namespace twostep::avx512 {
namespace {
#include "isa/act.inc"
#include "isa/avx512/act_rows.inc"
#include "isa/rows.inc"
}  // namespace
extern const RowKernels* const kRowKernels;
const RowKernels* const kRowKernels = &kTable;
}  // namespace twostep::avx512
