// What the sampler knows about every permanent row, on the device's side of the stream.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace twostep {

// The parameters of one request, checked and normalised by `SampleState::check`.
struct SamplingRow {
  float temperature = 0.0f;  // 0: greedy
  int top_k = 0;             // 0: off
  double top_p = 1.0;
  double min_p = 0.0;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<int32_t> allowed_ids;  // empty: all
  std::vector<std::vector<int32_t>> bad_words;
  std::vector<int32_t> stop_ids;     // masked while fewer than min_tokens are out
  int min_tokens = 0;
  int prompt_len = 0;
  uint64_t seed = 0;
  int num_logprobs = -1;         // of sampled tokens: -1 off, else how many besides the token's own
  int num_prompt_logprobs = -1;  // of scored tokens
  std::vector<int32_t> logprob_ids;  // of sampled tokens: these instead of the best num_logprobs

  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
  // Whether anything but temperature touches the logits of the token at `position`.
  bool edits_logits(int position) const {
    return has_penalties() || !bias_ids.empty() || !allowed_ids.empty() || !bad_words.empty() ||
           masks_stops(position);
  }
  bool masks_stops(int position) const {
    return position < prompt_len + min_tokens && !stop_ids.empty();
  }
};

// The distinct tokens of a request so far, in order of appearance.
class TokenCounts {
 public:
  struct Seen {
    int32_t id;
    int32_t in_output;  // how often the model has said it
  };
  void add(int32_t id, bool output) {
    const auto [at, fresh] = index_.try_emplace(id, static_cast<int32_t>(seen_.size()));
    if (fresh) seen_.push_back({id, 0});
    seen_[at->second].in_output += output;
  }
  const std::vector<Seen>& seen() const { return seen_; }

 private:
  std::vector<Seen> seen_;
  std::unordered_map<int32_t, int32_t> index_;
};

struct SampleRowState {
  SamplingRow params;
  TokenCounts counts;  // kept only if the row has penalties
};

// Rows are replaced by staged writes and updated by the sample op, both in stream order.
class SampleState {
 public:
  // Throws std::invalid_argument if a size is not positive.
  SampleState(int num_rows, int vocab_size, int num_threads);

  int num_rows() const { return static_cast<int>(rows_.size()); }
  int vocab_size() const { return vocab_size_; }
  int num_threads() const { return num_threads_; }

  // A row's new state from its parameters and all tokens known so far: the first prompt_len are
  // the prompt, the others outputs. Throws std::invalid_argument, naming the value, if one is out
  // of range.
  SampleRowState prepare(SamplingRow params, const int32_t* ids, int count) const;
  void check_row(int row) const;
  SampleRowState& row(int r) { return rows_[r]; }

 private:
  void check_ids(const std::vector<int32_t>& ids, const char* what) const;

  std::vector<SampleRowState> rows_;
  int vocab_size_;
  int num_threads_;
};

}  // namespace twostep
