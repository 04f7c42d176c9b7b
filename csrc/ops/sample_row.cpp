#include "ops/sample_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "ops/sample_philox.h"

namespace twostep {

namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr double kWeightOne = static_cast<double>(uint64_t{1} << kWeightBits);

bool nothing_left(const float* z, int n) {
  return std::all_of(z, z + n, [](float v) { return v == kMinusInf; });
}

void penalise(float* z, const SamplingRow& p, const TokenCounts& counts) {
  for (const auto& seen : counts.seen()) {
    float& v = z[seen.id];
    v = v > 0 ? v / p.repetition_penalty : v * p.repetition_penalty;
    if (seen.in_output == 0) continue;
    v -= p.frequency_penalty * static_cast<float>(seen.in_output);
    v -= p.presence_penalty;
  }
}

// The last token of a word is banned where the rest of it ends the output.
void ban_words(float* z, const SamplingRow& p, const int32_t* history, int position) {
  for (const auto& word : p.bad_words) {
    const int prefix = static_cast<int>(word.size()) - 1;
    if (position - prefix < p.prompt_len && prefix > 0) continue;
    if (std::equal(word.begin(), word.end() - 1, history + position - prefix)) z[word.back()] = kMinusInf;
  }
}

// Rises as the value falls, then as the index rises.
uint64_t sort_key(float value, int index) {
  value += 0.0f;  // -0 becomes +0: they are equal
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t falling = bits >> 31 ? bits : ~bits & 0x7fffffffu;
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint32_t>(index);
}

}  // namespace

SampleScratch::SampleScratch(int vocab_size)
    : logits_memory((static_cast<size_t>(vocab_size) + kCollectSlack) * sizeof(float)),
      values_memory((static_cast<size_t>(vocab_size) + kCollectSlack) * sizeof(float)),
      ids_memory((static_cast<size_t>(vocab_size) + kCollectSlack) * sizeof(int32_t)),
      logits(logits_memory.as<float>()),
      values(values_memory.as<float>()),
      ids(ids_memory.as<int32_t>()),
      block_max(sample_blocks(vocab_size)),
      block_sum(sample_blocks(vocab_size)) {}

RowSampler::Choice RowSampler::choose(const float* x, const uint32_t* allowed, const SampleRowState& state,
                                      const int32_t* history, int position) {
  const Processed p = process(x, allowed, state, history, position);
  // A penalty or the temperature may have driven a huge logit to infinity.
  if (p.scan.broken || p.scan.max == -kMinusInf) return {-1, SampleFailure::Broken};
  if (p.scan.max == kMinusInf) return {-1, SampleFailure::Masked};
  if (state.params.temperature == 0) return {best(p), SampleFailure::None};
  return {draw(p, state.params, uniform_bits(state.params.seed, position)), SampleFailure::None};
}

// Everything up to and including the temperature.
RowSampler::Processed RowSampler::process(const float* x, const uint32_t* allowed,
                                          const SampleRowState& state, const int32_t* history,
                                          int position) {
  const float temperature = state.params.temperature;
  const float scale = temperature > 0 ? 1.0f / temperature : 1.0f;
  float* blocks = s_.block_max.data();
  if (!state.params.edits_logits(position)) {
    if (!allowed && scale == 1.0f) return {x, kernels_.scan(x, nullptr, scale, vocab_, nullptr, blocks)};
    return {s_.logits, kernels_.scan(x, allowed, scale, vocab_, s_.logits, blocks)};
  }
  const LogitScan raw = kernels_.scan(x, allowed, 1.0f, vocab_, s_.logits, blocks);
  if (raw.broken) return {s_.logits, raw};
  edit(s_.logits, state, history, position);
  return {s_.logits, kernels_.scan(s_.logits, nullptr, scale, vocab_, s_.logits, blocks)};
}

void RowSampler::edit(float* z, const SampleRowState& state, const int32_t* history, int position) {
  const SamplingRow& p = state.params;
  if (!p.allowed_ids.empty()) keep_only(z, p.allowed_ids);
  for (size_t i = 0; i < p.bias_ids.size(); i++) z[p.bias_ids[i]] += p.bias_values[i];
  if (p.masks_stops(position)) mask_stops(z, p.stop_ids);
  if (p.has_penalties()) penalise(z, p, state.counts);
  ban_words(z, p, history, position);
}

void RowSampler::keep_only(float* z, const std::vector<int32_t>& ids) {
  s_.saved.clear();
  for (const int32_t id : ids) s_.saved.push_back(z[id]);
  std::fill_n(z, vocab_, kMinusInf);
  for (size_t i = 0; i < ids.size(); i++) z[ids[i]] = s_.saved[i];
}

// Where nothing but stop tokens is allowed, they stay.
void RowSampler::mask_stops(float* z, const std::vector<int32_t>& ids) {
  s_.saved.clear();
  for (const int32_t id : ids) {
    s_.saved.push_back(z[id]);
    z[id] = kMinusInf;
  }
  if (!nothing_left(z, vocab_)) return;
  for (size_t i = 0; i < ids.size(); i++) z[ids[i]] = s_.saved[i];
}

// The highest logit; of equals, the lowest id.
int RowSampler::best(const Processed& p) const {
  const auto block = std::find(s_.block_max.begin(), s_.block_max.end(), p.scan.max);
  const auto begin = (block - s_.block_max.begin()) * kSampleBlock;
  return static_cast<int>(std::find(p.z + begin, p.z + vocab_, p.scan.max) - p.z);
}

int RowSampler::draw(const Processed& p, const SamplingRow& params, uint64_t random) {
  const float max = p.scan.max;
  const float min_p = max + static_cast<float>(std::log(params.min_p));
  float lowest = std::max(max - kNegligible, min_p);
  if (params.top_k > 0) {
    const int count = collect_top_k(p, params.top_k, lowest);
    return draw_candidate(count, max, lowest, params.top_p, 0, random);
  }
  if (params.top_p == 1.0) return draw_any(p, lowest, random);
  const uint64_t total = kernels_.sum_weights(p.z, vocab_, max, lowest, s_.block_max.data(), s_.block_sum.data());
  // Tokens lighter than this cannot be among those that make up top_p: all of them together weigh
  // less than the rest may. A little is added for the rounding of exp and log.
  const double light = (1.0 - params.top_p) * static_cast<double>(total) / vocab_ / kWeightOne;
  const float heavy = max + static_cast<float>(std::log(light) - 1e-3);
  lowest = std::max(lowest, heavy);
  const int count = kernels_.collect(p.z, vocab_, lowest, s_.block_max.data(), s_.values, s_.ids);
  return draw_candidate(count, max, lowest, params.top_p, total, random);
}

// From all tokens whose logit is `lowest` or more: the inverse of their cumulative weights in order
// of id.
int RowSampler::draw_any(const Processed& p, float lowest, uint64_t random) {
  const uint64_t total =
      kernels_.sum_weights(p.z, vocab_, p.scan.max, lowest, s_.block_max.data(), s_.block_sum.data());
  uint64_t rest = uniform_below(total, random);
  size_t block = 0;
  while (rest >= s_.block_sum[block]) rest -= s_.block_sum[block++];
  const int begin = static_cast<int>(block) * kSampleBlock;
  const int count = std::min(kSampleBlock, vocab_ - begin);
  uint64_t weights[kSampleBlock];
  kernels_.weights(p.z + begin, count, p.scan.max, weights);
  for (int i = 0; i < count; i++) {
    const uint64_t weight = p.z[begin + i] >= lowest ? weights[i] : 0;
    if (rest < weight) return begin + i;
    rest -= weight;
  }
  return -1;  // not reached: the block's weights add up to its sum
}

// From the candidates in values and ids [count], none below `lowest`, cut down to top_p of `total`
// (0: of their own sum).
int RowSampler::draw_candidate(int count, float max, float lowest, double top_p, uint64_t total,
                               uint64_t random) {
  s_.weights.resize(count);
  const uint64_t* weights = s_.weights.data();
  kernels_.weights(s_.values, count, max, s_.weights.data());
  uint64_t mass = total > 0 ? total : std::accumulate(weights, weights + count, uint64_t{0});
  Cut cut{lowest, count, mass};
  if (top_p < 1.0) {
    const auto target = static_cast<uint64_t>(std::ceil(top_p * static_cast<double>(mass)));
    cut = find_cut(kernels_, {s_.values, weights, count, max, lowest}, target, s_.select);
  }
  uint64_t rest = uniform_below(cut.mass, random);
  for (int i = 0;; i++) {
    const uint64_t weight = cut.keeps(s_.values[i], i) ? weights[i] : 0;
    if (rest < weight) return s_.ids[i];
    rest -= weight;
  }
}

// A value that at least n logits reach, `lowest` or more: the n-th highest of the blocks' maxima.
float RowSampler::best_n_bound(int n, float lowest) {
  if (static_cast<size_t>(n) > s_.block_max.size()) return lowest;
  s_.block_order = s_.block_max;
  const auto nth = s_.block_order.begin() + (n - 1);
  std::nth_element(s_.block_order.begin(), nth, s_.block_order.end(), std::greater<float>());
  return std::max(lowest, *nth);
}

// Collects the k highest logits, all that equal the last of them, and nothing below `lowest`.
int RowSampler::collect_top_k(const Processed& p, int k, float lowest) {
  const float bound = best_n_bound(k, lowest);
  const int count = kernels_.collect(p.z, vocab_, bound, s_.block_max.data(), s_.values, s_.ids);
  if (count <= k) return count;
  const float last = find_cut(kernels_, {s_.values, nullptr, count, p.scan.max, bound},
                              static_cast<uint64_t>(k), s_.select).value;
  int kept = 0;
  for (int i = 0; i < count; i++) {
    const bool keep = s_.values[i] >= last;
    s_.values[kept] = s_.values[i];
    s_.ids[kept] = s_.ids[i];
    kept += keep;
  }
  return kept;
}

SampleFailure RowSampler::score(const float* x, int token, int n, const std::vector<int32_t>& ids,
                                TokenLogprobs& out) {
  float* blocks = s_.block_max.data();
  const LogitScan scan = kernels_.scan(x, nullptr, 1.0f, vocab_, nullptr, blocks);
  if (scan.broken) return SampleFailure::Broken;
  if (scan.max == kMinusInf) return SampleFailure::Masked;
  const uint64_t total =
      kernels_.sum_weights(x, vocab_, scan.max, scan.max - kNegligible, blocks, s_.block_sum.data());
  const double log_sum = std::log(static_cast<double>(total) / kWeightOne);
  out.rank = kernels_.count(x, vocab_, x[token], blocks);
  const size_t entries = 1 + (ids.empty() ? n : ids.size());
  out.ids.reserve(entries);
  out.logprobs.reserve(entries);
  const auto add = [&](int32_t id) {
    out.ids.push_back(id);
    out.logprobs.push_back(static_cast<float>(static_cast<double>(x[id]) - scan.max - log_sum));
  };
  add(token);
  if (!ids.empty()) {
    for (const int32_t id : ids) add(id);
  } else if (n > 0) {
    best_n(x, n, scan.max, log_sum, out);
  }
  return SampleFailure::None;
}

// Appends the n highest logits, falling; of equals, the lower id first.
void RowSampler::best_n(const float* x, int n, float max, double log_sum, TokenLogprobs& out) {
  const int count = kernels_.collect(x, vocab_, best_n_bound(n, kMinusInf), s_.block_max.data(), s_.values, s_.ids);
  auto& keys = s_.sort_keys;
  keys.resize(count);
  for (int i = 0; i < count; i++) keys[i] = sort_key(s_.values[i], i);
  if (n < count / 8) {
    std::partial_sort(keys.begin(), keys.begin() + n, keys.end());
  } else {
    std::sort(keys.begin(), keys.end());
  }
  for (int i = 0; i < n; i++) {
    const auto at = static_cast<uint32_t>(keys[i]);
    out.ids.push_back(s_.ids[at]);
    out.logprobs.push_back(static_cast<float>(static_cast<double>(s_.values[at]) - max - log_sum));
  }
}

}  // namespace twostep
