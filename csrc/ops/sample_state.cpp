#include "ops/sample_state.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace twostep {

namespace {

constexpr float kMaxBias = 100.0f;
// Below this, dividing by the temperature could overflow: greedy.
constexpr float kMinTemperature = 1e-5f;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("sampling: ") + message);
}

void check_numbers(const SamplingRow& p) {
  require(p.temperature >= 0 && std::isfinite(p.temperature), "temperature must be 0 or more");
  require(p.top_p > 0 && p.top_p <= 1, "top_p must be above 0 and at most 1");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p must be within 0 and 1");
  require(p.repetition_penalty > 0 && std::isfinite(p.repetition_penalty),
          "repetition_penalty must be above 0");
  require(std::isfinite(p.presence_penalty), "presence_penalty must be finite");
  require(std::isfinite(p.frequency_penalty), "frequency_penalty must be finite");
  require(p.min_tokens >= 0 && p.prompt_len >= 0, "min_tokens and prompt_len must be 0 or more");
  require(p.bias_ids.size() == p.bias_values.size(), "logit_bias needs one value for each id");
}

void sort_unique(std::vector<int32_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

}  // namespace

SampleState::SampleState(int num_rows, int vocab_size, int num_threads)
    : vocab_size_(vocab_size), num_threads_(num_threads) {
  if (num_rows < 1 || vocab_size < 1 || num_threads < 1) {
    throw std::invalid_argument("sample state: num_rows, vocab_size and num_threads must be positive");
  }
  rows_.resize(num_rows);
}

void SampleState::check_row(int row) const {
  if (row < 0 || row >= num_rows()) throw std::invalid_argument("sampling: no such row");
}

void SampleState::check_ids(const std::vector<int32_t>& ids, const char* what) const {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size_) {
      throw std::invalid_argument(std::string("sampling: ") + what + ": token id " + std::to_string(id) +
                                  " is outside the vocabulary of " + std::to_string(vocab_size_));
    }
  }
}

SampleRowState SampleState::prepare(SamplingRow params, const int32_t* ids, int count) const {
  check_numbers(params);
  check_ids(params.bias_ids, "logit_bias");
  check_ids(params.allowed_ids, "allowed_token_ids");
  check_ids(params.stop_ids, "stop_token_ids");
  check_ids(params.logprob_ids, "logprob_token_ids");
  for (const auto& word : params.bad_words) {
    require(!word.empty(), "bad_words: a word has no tokens");
    check_ids(word, "bad_words");
  }
  sort_unique(params.allowed_ids);
  sort_unique(params.stop_ids);
  for (float& value : params.bias_values) {
    require(!std::isnan(value), "logit_bias must be a number");
    value = std::clamp(value, -kMaxBias, kMaxBias);
  }
  if (params.temperature < kMinTemperature) params.temperature = 0.0f;
  if (params.top_k < 0 || params.top_k >= vocab_size_) params.top_k = 0;
  params.num_logprobs = std::clamp(params.num_logprobs, -1, vocab_size_);
  params.num_prompt_logprobs = std::clamp(params.num_prompt_logprobs, -1, vocab_size_);

  SampleRowState state;
  if (params.has_penalties()) {
    check_ids(std::vector<int32_t>(ids, ids + count), "prompt");
    for (int i = 0; i < count; i++) state.counts.add(ids[i], i >= params.prompt_len);
  }
  state.params = std::move(params);
  return state;
}

}  // namespace twostep
