// Sampling one row of logits: the rules of docs/sampling.md, in their order.
#pragma once
#include <cstdint>
#include <vector>

#include "core/memory.h"
#include "isa/sample.h"
#include "ops/sample.h"
#include "ops/sample_select.h"

namespace twostep {

// Working memory of one thread; pages are touched only by the features in use.
struct SampleScratch {
  Memory logits_memory, values_memory, ids_memory;
  float* logits = nullptr;   // [V] processed
  float* values = nullptr;   // [V] candidates in order of id: logit,
  int32_t* ids = nullptr;    // [V] id,
  std::vector<uint64_t> weights;  // and weight
  std::vector<float> block_max, block_order;
  std::vector<uint64_t> block_sum;
  SelectScratch select;
  std::vector<uint64_t> sort_keys;
  std::vector<float> saved;

  explicit SampleScratch(int vocab_size);
};

class RowSampler {
 public:
  RowSampler(const SampleKernels& kernels, int vocab_size, SampleScratch& scratch)
      : kernels_(kernels), vocab_(vocab_size), s_(scratch) {}

  struct Choice {
    int token;  // -1: none
    SampleFailure failure;
  };
  // The token at `position`, given the logits x [V], the grammar's words (or null) and the tokens
  // at 0 .. position - 1.
  Choice choose(const float* x, const uint32_t* allowed, const SampleRowState& state,
                const int32_t* history, int position);

  // Log-probabilities under the unprocessed logits: of `token`, and of `ids` or, if there are none,
  // of the best n.
  SampleFailure score(const float* x, int token, int n, const std::vector<int32_t>& ids,
                      TokenLogprobs& out);

 private:
  struct Processed {
    const float* z;
    LogitScan scan;
  };
  Processed process(const float* x, const uint32_t* allowed, const SampleRowState& state,
                    const int32_t* history, int position);
  void edit(float* z, const SampleRowState& state, const int32_t* history, int position);
  void keep_only(float* z, const std::vector<int32_t>& ids);
  void mask_stops(float* z, const std::vector<int32_t>& ids);
  int best(const Processed& p) const;
  int draw(const Processed& p, const SamplingRow& params, uint64_t random);
  int draw_any(const Processed& p, float lowest, uint64_t random);
  int draw_candidate(int count, float max, float lowest, double top_p, uint64_t total, uint64_t random);
  int collect_top_k(const Processed& p, int k, float lowest);
  float best_n_bound(int n, float lowest);
  void best_n(const float* x, int n, float max, double log_sum, TokenLogprobs& out);

  const SampleKernels& kernels_;
  const int vocab_;
  SampleScratch& s_;
};

}  // namespace twostep
