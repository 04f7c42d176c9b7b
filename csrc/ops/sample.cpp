#include "ops/sample.h"

#include <stdexcept>

#include "isa/sample.h"
#include "ops/sample_row.h"

namespace twostep {

namespace {

class Sample final : public Op {
 public:
  Sample(const KernelTable& table, std::shared_ptr<Rows> logits, std::shared_ptr<SampleState> state,
         std::shared_ptr<TokenTable> tokens)
      : kernels_(*table.sample), logits_(std::move(logits)), state_(std::move(state)), tokens_(std::move(tokens)) {
    if (logits_->width != state_->vocab_size()) {
      throw std::invalid_argument("sample: logits and state differ in vocabulary size");
    }
    if (tokens_->num_rows() < state_->num_rows()) {
      throw std::invalid_argument("sample: the token table has fewer rows than the state");
    }
    for (int t = 0; t < state_->num_threads(); t++) scratch_.emplace_back(state_->vocab_size());
  }
  const char* name() const override { return "sample"; }

  int num_chunks(const Step& step) const override {
    if (step.num_logits == 0) return 0;
    if (!step.sample) throw std::invalid_argument("sample: the step has no SampleStep");
    if (step.num_logits > logits_->max_rows) throw std::invalid_argument("sample: more rows than logits hold");
    const int words = step.sample->words_per_row();
    if (words != 0 && words != (state_->vocab_size() + 31) / 32) {
      throw std::invalid_argument("sample: the grammar's bitmask is not as wide as the vocabulary");
    }
    for (const int32_t row : step.rows) state_->check_row(row);
    return step.num_logits;
  }

  void run(const Step& step, int m, Worker& worker) const override {
    SampleStep& out = *step.sample;
    out.tokens[m] = -1;
    out.failures[m] = SampleFailure::None;
    out.logprobs[m] = {};
    const int row = step.rows[step.logits_reqs[m]];
    const int position = step.positions[step.logits_indices[m]] + 1;
    RowSampler sampler(kernels_, state_->vocab_size(), scratch_.at(worker.index));
    if (out.kinds[m] == SampleKind::Sample) {
      sample(out, m, row, position, sampler);
    } else if (out.kinds[m] == SampleKind::Score) {
      score(out, m, row, position, sampler);
    }
  }

 private:
  void sample(SampleStep& out, int m, int row, int position, RowSampler& sampler) const {
    SampleRowState& state = state_->row(row);
    int32_t* history = tokens_->row(row);
    const float* x = logits_->row(m);
    const auto [token, failure] = sampler.choose(x, out.bitmask(m), state, history, position);
    out.failures[m] = failure;
    if (failure != SampleFailure::None) return;
    if (state.params.num_logprobs >= 0) {
      sampler.score(x, token, state.params.num_logprobs, state.params.logprob_ids, out.logprobs[m]);
    }
    out.tokens[m] = token;
    if (state.params.has_penalties()) state.counts.add(token, true);
    // A token at max_len ends its request: nothing reads it as an input.
    if (position < tokens_->max_len()) history[position] = token;
  }

  void score(SampleStep& out, int m, int row, int position, RowSampler& sampler) const {
    const int n = state_->row(row).params.num_prompt_logprobs;
    if (n < 0) return;
    if (position >= tokens_->max_len()) throw std::out_of_range("no token to score beyond the table");
    const int target = tokens_->row(row)[position];
    if (target < 0 || target >= state_->vocab_size()) throw std::out_of_range("token to score outside the vocabulary");
    out.failures[m] = sampler.score(logits_->row(m), target, n, {}, out.logprobs[m]);
  }

  const SampleKernels& kernels_;
  std::shared_ptr<Rows> logits_;
  std::shared_ptr<SampleState> state_;
  std::shared_ptr<TokenTable> tokens_;
  mutable std::vector<SampleScratch> scratch_;  // one for each thread
};

}  // namespace

std::unique_ptr<Op> make_sample(const KernelTable& table, std::shared_ptr<Rows> logits,
                                std::shared_ptr<SampleState> state, std::shared_ptr<TokenTable> tokens) {
  return std::make_unique<Sample>(table, std::move(logits), std::move(state), std::move(tokens));
}

}  // namespace twostep
