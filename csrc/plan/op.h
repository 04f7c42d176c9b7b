// One recorded operation.
#pragma once
#include "core/read_ahead.h"
#include "plan/step.h"

namespace twostep {

// A thread that runs chunks.
struct alignas(64) Worker {
  int index = 0;  // 0 .. num_threads - 1: of scratch that each thread has for itself
  ReadAhead ahead;  // of the KV cache, for the attention that comes next
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
  // `worker` is the calling thread's own.
  virtual void run(const Step& step, int chunk, Worker& worker) const = 0;
  // Weights that chunks first .. end - 1 read from memory, in order. Whoever waits for an op in front of
  // this one fetches some of them meanwhile.
  virtual Stretch weights(const Step&, int /*first*/, int /*end*/) const { return {}; }
  // Whether it is an op that reads the KV cache, and what chunks first .. end - 1 read of it if memory paces them:
  // the products in front of it fetch that meanwhile. Called behind num_chunks, so that a step that doesn't fit has
  // been refused.
  virtual bool reads_cache() const { return false; }
  virtual void add_cached(const Step&, int /*first*/, int /*end*/, ReadAhead&) const {}
};

}  // namespace twostep
