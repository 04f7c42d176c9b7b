// One recorded operation.
#pragma once
#include "plan/step.h"

namespace twostep {

// Memory that an op is going to read.
struct Stretch {
  const char* begin = nullptr;
  const char* end = nullptr;
};

class Op {
 public:
  virtual ~Op() = default;
  // A short name for profiles: "linear 960x576 Q4_1".
  virtual const char* name() const = 0;
  // How many pieces this step's work is cut into; 0 skips the op. Called once, when launched,
  // before any chunk runs. Pieces may run in any order, on any thread, at the same time; an
  // element's value may not depend on the cut.
  virtual int num_chunks(const Step& step) const = 0;
  // `worker` is 0 .. num_threads - 1 and indexes per-thread scratch.
  virtual void run(const Step& step, int chunk, int worker) const = 0;
  // Weights that chunks first .. end - 1 read from memory, in order. Whoever waits for an op in front of
  // this one fetches some of them meanwhile.
  virtual Stretch weights(const Step&, int /*first*/, int /*end*/) const { return {}; }
};

}  // namespace twostep
