#include "ops/sample_select.h"

#include <algorithm>
#include <array>
#include <limits>

namespace twostep {

namespace {

// The range of the values is cut into equal buckets, the highest first; rounding keeps their order.
constexpr int kBuckets = 1024;
// So few elements are sorted.
constexpr size_t kSortBelow = 64;

using Element = SelectScratch::Element;
using Totals = std::array<uint64_t, kBuckets>;

// 0 where the values are too much alike to be told apart by it.
float bucket_scale(float high, float low) {
  if (!(high > low)) return 0;
  const float scale = (kBuckets - 1) / (high - low);
  return scale < std::numeric_limits<float>::infinity() ? scale : 0;
}

// The bucket in which the running total reaches `target`, which then counts from its beginning.
int reach(const Totals& totals, uint64_t& target) {
  int last = kBuckets - 1;
  while (last > 0 && totals[last] == 0) last--;
  int bucket = 0;
  while (bucket < last && totals[bucket] < target) target -= totals[bucket++];
  return bucket;
}

// The elements of the bucket that the target falls into, out of all; the first and largest round.
void first_members(const SampleKernels& kernels, const WeightedValues& in, uint64_t& target,
                   SelectScratch& s) {
  s.members.clear();
  const auto element = [&](int i) { return Element{in.values[i], i, in.weights ? in.weights[i] : 1}; };
  const float scale = bucket_scale(in.high, in.low);
  if (static_cast<size_t>(in.n) <= kSortBelow || scale == 0) {
    for (int i = 0; i < in.n; i++) s.members.push_back(element(i));
    return;
  }
  if (s.bucket.size() < static_cast<size_t>(in.n + kCollectSlack)) s.bucket.resize(in.n + kCollectSlack);
  kernels.bucket(in.values, in.n, in.high, scale, kBuckets - 1, s.bucket.data());
  Totals totals{};
  if (in.weights) {
    for (int i = 0; i < in.n; i++) totals[s.bucket[i]] += in.weights[i];
  } else {
    for (int i = 0; i < in.n; i++) totals[s.bucket[i]]++;
  }
  const int chosen = reach(totals, target);
  for (int i = 0; i < in.n; i++) {
    if (s.bucket[i] == chosen) s.members.push_back(element(i));
  }
}

// The same among the members. False if all of them stay.
bool narrow(std::vector<Element>& members, uint64_t& target) {
  const auto below = [](const Element& a, const Element& b) { return a.value < b.value; };
  const auto [low, high] = std::minmax_element(members.begin(), members.end(), below);
  const float top = high->value, scale = bucket_scale(top, low->value);
  if (scale == 0) return false;
  const auto bucket_of = [=](const Element& e) {
    return std::min(static_cast<int>((top - e.value) * scale), kBuckets - 1);
  };
  Totals totals{};
  for (const Element& e : members) totals[bucket_of(e)] += e.weight;
  const int chosen = reach(totals, target);
  const auto outside = [&](const Element& e) { return bucket_of(e) != chosen; };
  const auto end = std::remove_if(members.begin(), members.end(), outside);
  const bool shrunk = end != members.end();
  members.erase(end, members.end());
  return shrunk;
}

}  // namespace

Cut find_cut(const SampleKernels& kernels, const WeightedValues& in, uint64_t target,
             SelectScratch& scratch) {
  uint64_t missing = target;
  first_members(kernels, in, missing, scratch);
  auto& members = scratch.members;
  while (members.size() > kSortBelow && narrow(members, missing)) {
  }
  const auto before = [](const Element& a, const Element& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
  };
  if (!std::is_sorted(members.begin(), members.end(), before)) {
    std::sort(members.begin(), members.end(), before);
  }
  size_t at = 0;
  for (; at + 1 < members.size() && members[at].weight < missing; at++) missing -= members[at].weight;
  return {members[at].value, members[at].index, target - missing + members[at].weight};
}

}  // namespace twostep
