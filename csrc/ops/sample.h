// Sampling: logits to tokens, on the device's side of the stream. docs/sampling.md has the rules.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isa/kernels.h"
#include "ops/sample_state.h"
#include "plan/plan.h"
#include "plan/token_table.h"

namespace twostep {

// What happens to a row of logits.
enum class SampleKind : uint8_t {
  Sample,  // draw the token at the next position and write it to the token table
  Score,   // the token at the next position is known: its log-probability only
  Skip,    // nothing: a prompt's chunk that is not its last
};

enum class SampleFailure : uint8_t {
  None,
  Broken,  // a NaN or +Inf among the logits
  Masked,  // no token is left to choose
};

// Log-probabilities at one row; empty if the row asks for none.
struct TokenLogprobs {
  std::vector<int32_t> ids;      // [1 + n] the row's token, then the best n
  std::vector<float> logprobs;   // [1 + n]
  int rank = 0;                  // of the row's token: logits at least as high as its own
};

// What sampling reads and writes for one step; results are valid once the launch is complete.
struct SampleStep {
  std::vector<SampleKind> kinds;        // [S]
  std::vector<int32_t> tokens;          // [S] sampled; -1 if the row failed or is not sampled
  std::vector<SampleFailure> failures;  // [S]
  std::vector<TokenLogprobs> logprobs;  // [S]

  // `kinds` empty: every row is sampled. Throws std::invalid_argument if their number is not S, if a
  // request has two sampled rows, or scores a token that this very step samples.
  SampleStep(const Step& step, std::vector<SampleKind> kinds);

  // Grammar masks: for rows m[i], words [i][ceil(vocab / 32)], a set bit allows the token. Replaces
  // earlier ones. Call before the sample plan is launched.
  void set_bitmask(const std::vector<int32_t>& m, std::vector<uint32_t> words, int words_per_row);
  // The words of row m, or null.
  const uint32_t* bitmask(int m) const {
    return mask_of_row_.empty() || mask_of_row_[m] < 0
               ? nullptr
               : words_.data() + static_cast<size_t>(mask_of_row_[m]) * words_per_row_;
  }
  int words_per_row() const { return words_per_row_; }
  // The rows that failed, and why.
  std::vector<std::pair<int, std::string>> failed() const;

 private:
  std::vector<int32_t> mask_of_row_;
  std::vector<uint32_t> words_;
  int words_per_row_ = 0;
};

// Does for row m of `logits` what step.sample says. One chunk a row.
std::unique_ptr<Op> make_sample(const KernelTable&, std::shared_ptr<Rows> logits,
                                std::shared_ptr<SampleState> state, std::shared_ptr<TokenTable> table);

}  // namespace twostep
