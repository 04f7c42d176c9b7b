#include "ops/linear.h"

#include <nanobind/stl/tuple.h>

#include <memory>
#include <tuple>

#include "bindings/bindings.h"
#include "ops/linear_decode.h"

namespace twostep {

namespace {

using Part = std::tuple<std::string, int, int, ByteArray>;  // format, N, K, bytes

RawPart to_raw(const Part& part) {
  const auto& [name, n, k, data] = part;
  const Format format = format_of(name);
  if (n <= 0 || data.size() != row_bytes(format, k) * static_cast<size_t>(n)) {
    throw std::invalid_argument("weight: " + std::to_string(data.size()) + " bytes are not a " + name +
                                " matrix of " + std::to_string(n) + " x " + std::to_string(k));
  }
  return {format, n, k, data.data()};
}

Precision to_precision(const std::string& name) {
  if (name == "int8") return Precision::Int8;
  if (name == "bf16") return Precision::Exact;
  throw std::invalid_argument("precision '" + name + "' is neither int8 nor bf16");
}

GateFn to_gate_fn(const std::string& name) {
  if (name == "silu") return GateFn::Silu;
  if (name == "gelu_tanh") return GateFn::GeluTanh;
  throw std::invalid_argument("activation '" + name + "' is neither silu nor gelu_tanh");
}

std::shared_ptr<PackedWeight> pack(const Device& d, const std::vector<Part>& parts,
                                   const std::string& precision, int num_threads,
                                   std::shared_ptr<Arena> arena) {
  std::vector<RawPart> raw;
  for (const Part& part : parts) raw.push_back(to_raw(part));
  const Precision p = to_precision(precision);
  nb::gil_scoped_release release;
  Arena own;
  return std::make_shared<PackedWeight>(*d.table, raw, p, num_threads, arena ? *arena : own);
}

std::shared_ptr<GatedWeight> pack_gated(const Device& d, const Part& gate, const Part& up,
                                        const std::string& precision, int num_threads,
                                        std::shared_ptr<Arena> arena) {
  const RawPart raw_gate = to_raw(gate), raw_up = to_raw(up);
  const Precision p = to_precision(precision);
  nb::gil_scoped_release release;
  Arena own;
  return std::make_shared<GatedWeight>(*d.table, raw_gate, raw_up, p, num_threads, arena ? *arena : own);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack_rows(const PackedWeight& w, Int32Array ids) {
  for (size_t i = 0; i < ids.size(); i++) {
    if (ids.data()[i] < 0 || ids.data()[i] >= w.n()) throw std::out_of_range("unpack_rows: no such row");
  }
  auto* data = new float[ids.size() * w.k() + 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  for (size_t i = 0; i < ids.size(); i++) w.unpack_row(ids.data()[i], data + i * w.k());
  return {data, {ids.size(), static_cast<size_t>(w.k())}, owner};
}

void bind_weights(nb::module_& m) {
  nb::class_<Arena>(m, "Arena", "Memory that the weights of one model share.")
      .def(nb::new_([](int64_t dear_nanoseconds) { return std::make_shared<Arena>(dear_nanoseconds); }),
           nb::arg("dear_nanoseconds") = PatientMemory::kDearNanoseconds,
           "A huge page that takes longer is dear: the rest then comes in small ones; negative: all of it.");
  m.def("is_finite", [](const Part& part, int num_threads) {
    const RawPart raw = to_raw(part);
    nb::gil_scoped_release release;
    return is_finite(raw, num_threads);
  }, nb::arg("part"), nb::arg("num_threads") = 1, "Whether none of the weights is NaN or infinite.");
  nb::class_<PackedWeight>(m, "Weight", "Rows stacked from parts, packed for a device's kernels.")
      .def(nb::new_(&pack), nb::arg("device"), nb::arg("parts"), nb::arg("precision"),
           nb::arg("num_threads") = 1, nb::arg("arena").none() = nb::none(),
           "parts: (format, N, K, bytes as uint8 [size]) each; precision: int8 or bf16.")
      .def_prop_ro("nbytes", &PackedWeight::bytes)
      .def_prop_ro("shape", [](const PackedWeight& w) { return nb::make_tuple(w.n(), w.k()); })
      .def_prop_ro("act_form", &PackedWeight::act_form)
      .def("unpack_rows", &unpack_rows, nb::arg("ids"), "Rows as float32 [len(ids), K].");

  nb::class_<GatedWeight>(m, "GatedWeight", "The two weights of a gated layer.")
      .def_prop_ro("nbytes", &GatedWeight::bytes)
      .def_prop_ro("shape", [](const GatedWeight& w) { return nb::make_tuple(w.gate.n(), w.gate.k()); })
      .def_prop_ro("act_form", [](const GatedWeight& w) { return w.gate.act_form(); })
      .def("unpack_gate_rows", [](const GatedWeight& w, Int32Array ids) { return unpack_rows(w.gate, ids); })
      .def("unpack_up_rows", [](const GatedWeight& w, Int32Array ids) { return unpack_rows(w.up, ids); });
  m.def("gated_weight", &pack_gated, nb::arg("device"), nb::arg("gate_part"), nb::arg("up_part"),
        nb::arg("precision"), nb::arg("num_threads") = 1, nb::arg("arena").none() = nb::none());
}

}  // namespace

void bind_linear(nb::module_& m) {
  bind_weights(m);
  using Acts = std::vector<std::shared_ptr<ActBuffer>>;
  m.def("add_linear", [](Plan& plan, const Device& d, std::shared_ptr<ActBuffer> act,
                         std::shared_ptr<PackedWeight> weight, std::shared_ptr<Vector> bias,
                         std::shared_ptr<Rows> out, bool add_to_out, RowSet set) {
    plan.add(make_linear(*d.table, act, weight, bias, out, add_to_out, set));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("act"), nb::arg("weight"), nb::arg("bias").none(),
     nb::arg("out"), nb::arg("add_to_out") = false, nb::arg("set") = RowSet::Tokens);

  m.def("add_gated_linear", [](Plan& plan, const Device& d, std::shared_ptr<ActBuffer> act,
                               std::shared_ptr<GatedWeight> weight, const std::string& activation,
                               Acts acts, std::shared_ptr<Rows> rows, RowSet set) {
    plan.add(make_gated_linear(*d.table, act, weight, to_gate_fn(activation), std::move(acts), rows, set));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("act"), nb::arg("weight"), nb::arg("activation"),
     nb::arg("acts"), nb::arg("rows").none() = nb::none(), nb::arg("set") = RowSet::Tokens);

  m.def("add_logits", [](Plan& plan, const Device& d, std::shared_ptr<ActBuffer> act,
                         std::shared_ptr<PackedWeight> weight, float softcap, std::shared_ptr<Rows> out) {
    plan.add(make_logits(*d.table, act, weight, softcap, out));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("act"), nb::arg("weight"), nb::arg("softcap"),
     nb::arg("out"));

  m.def("add_embed", [](Plan& plan, const Device&, std::shared_ptr<TokenTable> tokens,
                        std::shared_ptr<PackedWeight> weight, float scale, std::shared_ptr<Rows> out) {
    plan.add(make_embed(tokens, weight, scale, out));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("token_table"), nb::arg("weight"), nb::arg("scale"),
     nb::arg("out"));

  m.def("add_moe", [](Plan& plan, const Device& d, std::shared_ptr<Rows> router_logits,
                      std::shared_ptr<ActBuffer> act, std::vector<std::shared_ptr<GatedWeight>> gated,
                      std::vector<std::shared_ptr<PackedWeight>> down, int top_k, bool norm_topk_prob,
                      const std::string& activation, std::shared_ptr<Rows> out, RowSet set) {
    const MoeSpec spec{top_k, norm_topk_prob, to_gate_fn(activation), out->max_rows, set};
    for (auto& op : make_moe(*d.table, router_logits, act, std::move(gated), std::move(down), spec, out)) {
      plan.add(std::move(op));
    }
  }, nb::arg("plan"), nb::arg("device"), nb::arg("router_logits"), nb::arg("act"), nb::arg("gated"),
     nb::arg("down"), nb::arg("top_k"), nb::arg("norm_topk_prob"), nb::arg("activation"), nb::arg("out"),
     nb::arg("set") = RowSet::Tokens);
}

}  // namespace twostep
