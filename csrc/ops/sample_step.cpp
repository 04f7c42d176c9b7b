#include <stdexcept>

#include "ops/sample.h"

namespace twostep {

SampleStep::SampleStep(const Step& step, std::vector<SampleKind> kinds_) : kinds(std::move(kinds_)) {
  const auto n = static_cast<size_t>(step.num_logits);
  if (kinds.empty()) kinds.assign(n, SampleKind::Sample);
  if (kinds.size() != n) throw std::invalid_argument("sample step: one kind for each row of logits");
  std::vector<bool> sampled(step.num_reqs, false);
  const auto next_is_new = [&](size_t m) {
    return step.positions[step.logits_indices[m]] + 1 >= step.seq_lens[step.logits_reqs[m]];
  };
  for (size_t m = 0; m < n; m++) {
    if (kinds[m] != SampleKind::Sample) continue;
    if (sampled[step.logits_reqs[m]]) {
      throw std::invalid_argument("sample step: a request is sampled once a step");
    }
    sampled[step.logits_reqs[m]] = true;
    if (!next_is_new(m)) throw std::invalid_argument("sample step: only a request's last row is sampled");
  }
  for (size_t m = 0; m < n; m++) {
    if (kinds[m] == SampleKind::Score && sampled[step.logits_reqs[m]] && next_is_new(m)) {
      throw std::invalid_argument("sample step: scores a token that is only sampled in this step");
    }
  }
  tokens.assign(n, -1);
  failures.assign(n, SampleFailure::None);
  logprobs.resize(n);
}

void SampleStep::set_bitmask(const std::vector<int32_t>& m, std::vector<uint32_t> words,
                             int words_per_row) {
  if (words.size() != m.size() * static_cast<size_t>(words_per_row)) {
    throw std::invalid_argument("bitmask: one line of words for each row");
  }
  std::vector<int32_t> mask_of_row(kinds.size(), -1);
  for (size_t i = 0; i < m.size(); i++) {
    if (m[i] < 0 || static_cast<size_t>(m[i]) >= kinds.size()) {
      throw std::invalid_argument("bitmask: no such row of logits");
    }
    mask_of_row[m[i]] = static_cast<int32_t>(i);
  }
  mask_of_row_ = std::move(mask_of_row);
  words_ = std::move(words);
  words_per_row_ = words_per_row;
}

std::vector<std::pair<int, std::string>> SampleStep::failed() const {
  std::vector<std::pair<int, std::string>> rows;
  for (size_t m = 0; m < failures.size(); m++) {
    if (failures[m] == SampleFailure::None) continue;
    rows.emplace_back(static_cast<int>(m), failures[m] == SampleFailure::Broken
                                               ? "the model's logits hold a NaN or an infinity"
                                               : "no token is left that the request allows");
  }
  return rows;
}

}  // namespace twostep
