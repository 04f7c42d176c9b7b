// One recorded operation.
#pragma once
#include "plan/step.h"

namespace twostep {

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
};

}  // namespace twostep
