#include "plan/step.h"

#include <stdexcept>

namespace twostep {

void Tiles::build(int num_rows, int max_rows) {
  const int n = (num_rows + max_rows - 1) / max_rows;
  tiles.resize(n);
  tile_of_row.resize(num_rows);
  int r0 = 0;
  for (int i = 0; i < n; i++) {
    const int end = static_cast<int>(static_cast<int64_t>(num_rows) * (i + 1) / n);
    tiles[i] = {r0, end - r0};
    for (int m = r0; m < end; m++) tile_of_row[m] = i;
    r0 = end;
  }
}

void Step::derive(const int max_rows[kNumActForms]) {
  const size_t n = static_cast<size_t>(num_reqs);
  if (query_start_loc.size() != n + 1 || seq_lens.size() != n || rows.size() != n ||
      block_starts.size() != n + 1 || logits_reqs.size() != logits_indices.size()) {
    throw std::invalid_argument("step: arrays disagree about the number of requests");
  }
  num_logits = static_cast<int>(logits_indices.size());
  positions.resize(num_tokens);
  req_of_token.resize(num_tokens);
  has_lone_tokens = true;
  for (int r = 0; r < num_reqs; r++) {
    const int begin = query_start_loc[r], end = query_start_loc[r + 1];
    if (begin < 0 || end < begin || end > num_tokens || seq_lens[r] < end - begin) {
      throw std::invalid_argument("step: query_start_loc or seq_lens out of range");
    }
    if (end - begin != 1) has_lone_tokens = false;
    for (int t = begin; t < end; t++) {
      positions[t] = seq_lens[r] - (end - t);
      req_of_token[t] = r;
    }
  }
  samples_all = num_logits == num_tokens;
  for (int s = 0; s < num_logits; s++) samples_all = samples_all && logits_indices[s] == s;
  for (int f = 0; f < kNumActForms; f++) {
    tiles[0][f].build(num_tokens, max_rows[f]);
    tiles[1][f].build(num_logits, max_rows[f]);
  }
}

}  // namespace twostep
