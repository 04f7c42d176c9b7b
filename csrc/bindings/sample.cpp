#include "ops/sample.h"

#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"

namespace twostep {

namespace {

using Ids = std::vector<int32_t>;
using ByteMask = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<SampleKind> to_kinds(const std::optional<ByteMask>& kinds) {
  std::vector<SampleKind> result;
  if (!kinds) return result;
  for (size_t i = 0; i < kinds->size(); i++) {
    const uint8_t kind = kinds->data()[i];
    if (kind > static_cast<uint8_t>(SampleKind::Skip)) throw std::invalid_argument("sample step: no such kind");
    result.push_back(static_cast<SampleKind>(kind));
  }
  return result;
}

// A copy of `values` that numpy owns.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(const std::vector<T>& values) {
  auto* keep = new std::vector<T>(values);
  nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(keep->data(), {keep->size()}, owner);
}

void stage(std::shared_ptr<SampleState> state, Step& step, int row, const Int32Array& token_ids,
           SamplingRow params) {
  state->check_row(row);
  // Shared, because a std::function is copied; moved out by its only run.
  auto fresh = std::make_shared<SampleRowState>(
      state->prepare(std::move(params), token_ids.data(), static_cast<int>(token_ids.size())));
  step.staged.emplace_back([state, row, fresh] { state->row(row) = std::move(*fresh); });
}

void bind_state(nb::module_& m) {
  nb::class_<SampleState>(m, "SampleState")
      .def(nb::new_([](int num_rows, int vocab_size, int num_threads) {
        return std::make_shared<SampleState>(num_rows, vocab_size, num_threads);
      }), nb::arg("num_rows"), nb::arg("vocab_size"), nb::arg("num_threads"))
      .def_prop_ro("num_rows", &SampleState::num_rows)
      .def_prop_ro("vocab_size", &SampleState::vocab_size)
      .def("stage", [](std::shared_ptr<SampleState> state, Step& step, int row, Int32Array token_ids,
                       int prompt_len, uint64_t seed, float temperature, int top_k, double top_p,
                       double min_p, float repetition_penalty, float presence_penalty,
                       float frequency_penalty, Ids bias_ids, std::vector<float> bias_values, Ids allowed_ids,
                       std::vector<Ids> bad_words, Ids stop_ids, int min_tokens, int num_logprobs,
                       int num_prompt_logprobs, Ids logprob_ids) {
        SamplingRow p;
        p.prompt_len = prompt_len;
        p.seed = seed;
        p.temperature = temperature;
        p.top_k = top_k;
        p.top_p = top_p;
        p.min_p = min_p;
        p.repetition_penalty = repetition_penalty;
        p.presence_penalty = presence_penalty;
        p.frequency_penalty = frequency_penalty;
        p.bias_ids = std::move(bias_ids);
        p.bias_values = std::move(bias_values);
        p.allowed_ids = std::move(allowed_ids);
        p.bad_words = std::move(bad_words);
        p.stop_ids = std::move(stop_ids);
        p.min_tokens = min_tokens;
        p.num_logprobs = num_logprobs;
        p.num_prompt_logprobs = num_prompt_logprobs;
        p.logprob_ids = std::move(logprob_ids);
        stage(std::move(state), step, row, token_ids, std::move(p));
      }, nb::arg("step"), nb::arg("row"), nb::arg("token_ids"), nb::kw_only(), nb::arg("prompt_len"),
         nb::arg("seed") = 0, nb::arg("temperature") = 0.0f, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0,
         nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0f, nb::arg("presence_penalty") = 0.0f,
         nb::arg("frequency_penalty") = 0.0f, nb::arg("bias_ids") = Ids(),
         nb::arg("bias_values") = std::vector<float>(), nb::arg("allowed_ids") = Ids(),
         nb::arg("bad_words") = std::vector<Ids>(), nb::arg("stop_ids") = Ids(), nb::arg("min_tokens") = 0,
         nb::arg("num_logprobs") = -1, nb::arg("num_prompt_logprobs") = -1,
         nb::arg("logprob_ids") = Ids(),
         "Replaces a row's parameters and history, in stream order (see docs/sampling.md).");
}

void bind_step(nb::module_& m) {
  nb::class_<SampleStep>(m, "SampleStep")
      .def(nb::new_([](Step& step, std::optional<ByteMask> kinds) {
        auto sample = std::make_shared<SampleStep>(step, to_kinds(kinds));
        step.sample = sample;
        return sample;
      }), nb::arg("step"), nb::arg("kinds") = nb::none(),
         "Attaches itself to the step. kinds: uint8 [S] of SAMPLE, SCORE, SKIP; None: all SAMPLE.")
      .def_prop_ro_static("SAMPLE", [](nb::handle) { return static_cast<int>(SampleKind::Sample); })
      .def_prop_ro_static("SCORE", [](nb::handle) { return static_cast<int>(SampleKind::Score); })
      .def_prop_ro_static("SKIP", [](nb::handle) { return static_cast<int>(SampleKind::Skip); })
      .def("set_bitmask", [](SampleStep& s, Int32Array m, Int32Matrix words) {
        s.set_bitmask({m.data(), m.data() + m.size()},
                      {reinterpret_cast<const uint32_t*>(words.data()),
                       reinterpret_cast<const uint32_t*>(words.data()) + words.size()},
                      static_cast<int>(words.shape(1)));
      }, nb::arg("m"), nb::arg("words"),
         "For rows m: int32 words [len(m), ceil(V / 32)], a set bit allows the token.")
      .def("tokens", [](const SampleStep& s) { return s.tokens; }, "int [S]; -1: failed, or not sampled.")
      .def("failed", &SampleStep::failed, "[(row, why)]: the rows that could not be sampled or scored.")
      .def("logprobs", [](const SampleStep& s, int m) -> nb::object {
        const TokenLogprobs& row = s.logprobs.at(m);
        if (row.ids.empty()) return nb::none();
        return nb::make_tuple(to_numpy(row.ids), to_numpy(row.logprobs), row.rank);
      }, nb::arg("m"),
         "None, or (ids int32 [1 + n], logprobs float32 [1 + n], rank): the row's token, then the best n, or"
         " logprob_ids.");
}

}  // namespace

void bind_sample(nb::module_& m) {
  bind_state(m);
  bind_step(m);
  m.def("add_sample", [](Plan& plan, const Device& d, std::shared_ptr<Rows> logits,
                         std::shared_ptr<SampleState> state, std::shared_ptr<TokenTable> token_table) {
    plan.add(make_sample(*d.table, std::move(logits), std::move(state), std::move(token_table)));
  }, nb::arg("plan"), nb::arg("device"), nb::arg("logits"), nb::arg("state"), nb::arg("token_table"),
     "Samples or scores each row of logits as the step's SampleStep says.");
}

}  // namespace twostep
