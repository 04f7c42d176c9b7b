#include "ops/pool.h"

#include "bindings/bindings.h"

namespace twostep {

void bind_pool(nb::module_& m) {
  nb::class_<PooledStep>(m, "PooledStep", "The place for a step's vectors; made before its launch.")
      .def(nb::new_([](std::shared_ptr<Step> step, int width) {
        step->pooled = std::make_shared<PooledStep>(*step, width);
        return step->pooled;
      }), nb::arg("step"), nb::arg("width"))
      .def("numpy", [](std::shared_ptr<PooledStep> pooled) {
        auto* keep = new std::shared_ptr<PooledStep>(pooled);
        nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<PooledStep>*>(p); });
        const size_t width = pooled->width;
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            pooled->values.data(), {pooled->values.size() / width, width}, owner);
      }, "The vectors [S, width], float32; valid once the launch is complete.");
  m.def("add_pool_rows", [](Plan& plan, std::shared_ptr<Rows> x) {
    plan.add(make_pool_rows(x));
  }, nb::arg("plan"), nb::arg("x"));
  m.def("add_pool_mean", [](Plan& plan, const Device& d, std::shared_ptr<Rows> x, std::shared_ptr<Rows> sums) {
    plan.add(make_pool_mean(*d.table, x, sums));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("x"), nb::arg("sums"));
}

}  // namespace twostep
