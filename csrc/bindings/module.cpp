#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "twostep's native kernels; see csrc/ and docs/kernels.md";
  nanobind::set_leak_warnings(false);
  twostep::bind_core(m);
  twostep::bind_rows(m);
#ifdef TWOSTEP_HAVE_LINEAR
  twostep::bind_linear(m);
#endif
#ifdef TWOSTEP_HAVE_ATTENTION
  twostep::bind_attention(m);
#endif
#ifdef TWOSTEP_HAVE_SAMPLE
  twostep::bind_sample(m);
#endif
}
