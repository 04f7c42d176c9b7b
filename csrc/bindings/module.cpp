#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "twostep's native kernels; see csrc/ and docs/kernels.md";
  nanobind::set_leak_warnings(false);
  twostep::bind_core(m);
  twostep::bind_peak(m);
  twostep::bind_rows(m);
  twostep::bind_linear(m);
  twostep::bind_attention(m);
  twostep::bind_sample(m);
  twostep::bind_pool(m);
  twostep::bind_strings(m);
}
