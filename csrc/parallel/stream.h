// A FIFO of launches served by a few compute threads: what a CUDA stream is to a GPU.
//
// `launch` only enqueues. The stream's own threads start on it at once; a thread that waits for a
// launch joins in as worker 0 until it is complete ("caller joins"). So on a machine with two cores
// the engine thread plans the next step while the helper computes, and computes while it waits:
// never more runnable threads than cores, never an idle one.
//
// Within a launch, ops run one after the other; the chunks of an op are claimed: each worker first
// walks its own contiguous range (long sequential streams, an uncontended counter), then steals from
// the others. An op is complete when all CHUNKS are done, not when all threads arrived: a thread
// that lost its core and holds no chunk stalls nobody, and a late joiner finds its place.
//
// A thread that waits for an op to be completed fetches what it will read next: the weights of the next
// product. While norms and attention compute, memory would idle, and memory paces a step of few rows. With more
// rows it idles while products compute, and paces attention: products fetch what that will read (Worker::ahead).
//
// An op of a single chunk (the norms and the rotation of a few tokens) has nothing to share: whoever
// completes the op in front of it runs it as well, and the others wait once instead of twice.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan/plan.h"

namespace twostep {

class Stream {
 public:
  // `num_threads` compute threads. With `caller_joins` one of them is whoever waits, so
  // num_threads - 1 threads are started (with 1, work only advances inside `wait`).
  Stream(int num_threads, bool caller_joins);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Enqueues and returns a ticket; tickets count up from 1. `plan` must outlive the launch.
  uint64_t launch(const Plan& plan, std::shared_ptr<const Step> step);

  // Returns once the launch and all before it are complete. Throws std::runtime_error with the
  // message of an op that failed. One thread at a time may wait.
  void wait(uint64_t ticket);
  bool done(uint64_t ticket) const { return completed_.load(std::memory_order_acquire) >= ticket; }

  int num_threads() const { return num_threads_; }
  // Tickets of the last launch made.
  uint64_t last_ticket() const { return last_ticket_; }

  // What the stream's own threads do, piece by piece, before they sleep: a piece returns whether there was
  // something to do. It is told whether the thread has been without work for 200 ms. A launch waits for one piece at
  // most, and only if all threads are at it.
  using IdleWork = std::function<bool(bool rested)>;
  void set_idle_work(IdleWork piece);

  // Nanoseconds by op of every launch completed since the profile was switched on:
  // {name, total nanoseconds, number of runs}.
  struct ProfileRow {
    std::string name;
    double nanoseconds;
    int64_t runs;
  };
  void set_profile(bool on) { profiling_.store(on); }
  std::vector<ProfileRow> profile();

  // When launches ran, in nanoseconds of the steady clock: from the moment a thread claimed the first
  // piece of work until the launch was retired. Launches run one after the other, so spans never
  // overlap. Two looks at the clock for a launch; nothing while timing is off.
  struct Span {
    uint64_t ticket;
    int64_t start;
    int64_t end;
  };
  void set_timing(bool on) { timing_.store(on); }
  // The spans of completed launches first..last; those, and all before them, are forgotten.
  std::vector<Span> take_spans(uint64_t first, uint64_t last);

 private:
  struct alignas(64) Counter {
    std::atomic<int32_t> value{0};
  };
  struct OpRun {
    const Op* op;
    int32_t chunks;
    int32_t riders;  // ops of one chunk right behind, run by the thread that completes this one
  };
  struct Launch {
    uint64_t ticket = 0;
    std::shared_ptr<const Step> step;
    std::vector<OpRun> ops;
    std::vector<size_t> cache_readers;    // those of them that read the KV cache
    std::unique_ptr<Counter[]> counters;  // [ops][num_threads + 1]: next chunk by worker, then chunks done
    size_t counters_size = 0;
    std::atomic<int32_t> current_op{0};   // a hint for late joiners
    std::atomic<bool> failed{false};
    std::string error;
    std::vector<int64_t> op_end;          // nanoseconds, when profiling
    int64_t started = 0;                  // when it was enqueued
    bool timed = false;
    std::atomic<int64_t> begun{0};        // when the first piece was claimed, if timed
  };
  using LaunchPtr = std::shared_ptr<Launch>;

  struct Range {
    int begin, end;
  };
  // What a thread fetches while it waits.
  struct Fetch {
    size_t op = 0;  // the op whose weights these are, or the last one that was looked at in vain
    Stretch rest;
  };

  void worker_loop(Worker& worker);
  bool do_idle_work(bool rested);
  LaunchPtr next_launch(uint64_t after);
  void execute(Launch& launch, Worker& worker);
  void run_chunk(Launch& launch, const OpRun& op, int chunk, Worker& worker);
  void run_riders(Launch& launch, size_t leader, Worker& worker);
  // The chunks of an op that a worker begins with.
  Range share(const OpRun& op, int worker) const;
  Fetch fetch_behind(const Launch& launch, size_t op, int worker) const;
  void look_ahead(const Launch& launch, size_t op, Worker& worker) const;
  void finish(const LaunchPtr& launch);
  void note_span(const Launch& launch);
  Counter& counter(Launch& launch, size_t op, int which) const {
    return launch.counters[op * (num_threads_ + 1) + which];
  }

  const int num_threads_;
  const bool caller_joins_;
  std::vector<Worker> workers_;          // each touched by its thread only; worker 0's may be whoever waits
  std::vector<std::thread> threads_;

  mutable std::mutex mutex_;             // guards queue_, free_, errors_, profile_, spans_, idle_work_
  std::shared_ptr<const IdleWork> idle_work_;
  std::deque<LaunchPtr> queue_;          // not yet complete, oldest first
  std::vector<LaunchPtr> free_;          // to be used again
  std::vector<std::pair<uint64_t, std::string>> errors_;
  std::vector<ProfileRow> profile_;
  std::deque<Span> spans_;               // oldest first
  int64_t last_end_ = 0;                 // of the last profiled launch
  std::atomic<uint64_t> completed_{0};
  uint64_t last_ticket_ = 0;
  std::atomic<bool> profiling_{false};
  std::atomic<bool> timing_{false};

  std::atomic<uint32_t> epoch_{0};       // bumped by every launch; sleeping threads wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace twostep
