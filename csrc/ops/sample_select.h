// Selection without a full sort: where does the running total of values in falling order reach a
// target?
#pragma once
#include <cstdint>
#include <vector>

#include "isa/sample.h"

namespace twostep {

struct WeightedValues {
  const float* values;      // [n], finite
  const uint64_t* weights;  // [n]; null: all 1
  int n;                    // >= 1
  float high, low;          // no value lies outside
};

// A place in the order (value falling, then index rising): everything up to and including it is in.
struct Cut {
  float value;
  int32_t index;
  uint64_t mass;  // the weights of all that is in
  bool keeps(float v, int32_t i) const { return v > value || (v == value && i <= index); }
};

struct SelectScratch {
  struct Element {
    float value;
    int32_t index;
    uint64_t weight;
  };
  std::vector<int32_t> bucket;
  std::vector<Element> members;
};

// The first element at which the weights, added up in order (value falling, index rising), reach
// `target`; if they never do, the last element. Takes time in proportion to n.
Cut find_cut(const SampleKernels& kernels, const WeightedValues& in, uint64_t target,
             SelectScratch& scratch);

}  // namespace twostep
