#include "ops/rows.h"

#include <algorithm>

#include "bindings/bindings.h"

namespace twostep {

void bind_rows(nb::module_& m) {
  nb::class_<Vector>(m, "Vector")
      .def(nb::new_([](FloatArray values) {
        auto v = std::make_shared<Vector>(static_cast<int>(values.size()));
        std::copy_n(values.data(), values.size(), v->data);
        return v;
      }))
      .def_ro("size", &Vector::size);

  using Acts = std::vector<std::shared_ptr<ActBuffer>>;
  m.def("add_rms_norm", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
                           float eps, RowSet set, std::shared_ptr<Rows> rows, Acts acts) {
    plan.add(make_rms_norm(*d.table, x, weight, eps, set, rows, std::move(acts)));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("set"),
     nb::arg("rows").none(), nb::arg("acts"));
  m.def("add_rms_norm_add", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
                               float eps, RowSet set, std::shared_ptr<Rows> residual) {
    plan.add(make_rms_norm_add(*d.table, x, weight, eps, set, residual));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("set"),
     nb::arg("residual"));
  m.def("add_add", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Rows> residual,
                      RowSet set) {
    plan.add(make_add(*d.table, x, set, residual));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("residual"), nb::arg("set") = RowSet::Tokens);
  m.def("add_put_rows", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, RowSet set, Acts acts) {
    plan.add(make_put_rows(*d.table, x, set, std::move(acts)));
  });
  m.def("add_layer_norm", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Vector> weight,
                             std::shared_ptr<Vector> bias, float eps, std::shared_ptr<Rows> rows, Acts acts) {
    plan.add(make_layer_norm(*d.table, x, weight, bias, eps, rows, std::move(acts)));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"),
     nb::arg("rows").none(), nb::arg("acts"));
  m.def("add_gelu", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Rows> rows,
                       Acts acts) {
    plan.add(make_gelu(*d.table, x, rows, std::move(acts)));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("rows").none(), nb::arg("acts"));
  m.def("add_positions", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Vector> table) {
    plan.add(make_add_positions(*d.table, x, table));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("table"));
  m.def("add_gather", [](Plan& plan, std::shared_ptr<Rows> x, std::shared_ptr<Rows> out) {
    plan.add(make_gather(x, out));
  });
  m.def("add_apply_staged", [](Plan& plan) { plan.add(make_apply_staged()); });
}

}  // namespace twostep
