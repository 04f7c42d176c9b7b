#include "isa/sample.h"

#include <cmath>

#include "core/act.h"
#include "isa/neon/sample_vec.h"

namespace twostep::neon {
namespace {
#include "isa/act.inc"
#include "isa/sample.inc"
}  // namespace
extern const SampleKernels* const kSampleKernels;
const SampleKernels* const kSampleKernels = &kTable;
}  // namespace twostep::neon
