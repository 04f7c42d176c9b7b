#include "parallel/stream.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <utility>

#include "parallel/time_slice.h"

namespace twostep {

namespace {

// A thread that finds nothing to do spins this long before it sleeps: waking it costs ~60 us,
// and the next step of a decode usually arrives sooner.
constexpr int64_t kSpinNanoseconds = 300'000;
// Without work for so long a thread has time for long pieces of idle work: between two requests of a busy engine it
// has not.
constexpr timespec kRest{0, 200'000'000};
// A thread that sees nothing happen for longer was stopped (SIGSTOP, a laptop's lid), and that is no rest: work may be
// on its way as the process goes on.
constexpr int64_t kStoppedNanoseconds = 250'000'000;
// Inside an op, a thread whose peers still compute yields after this many pauses: the peer may
// have lost its core to us.
constexpr int kPausesBeforeYield = 4000;
// Spans that nobody took: those of failed steps, say. More than any step has launches.
constexpr size_t kMaxSpans = 4096;
// How many ops ahead a waiting thread looks for weights, and how much of them it fetches: they must still
// be in its L2 cache when their turn comes.
constexpr size_t kOpsToWeights = 6;
constexpr std::ptrdiff_t kBytesOfWeights = 128 << 10;
constexpr std::ptrdiff_t kFetchPiece = 512;
// Ops that are fetched from memory before a launch asks how many chunks they have.
constexpr size_t kOpsAhead = 12;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void prefetch(const Op* op) {
  const auto* bytes = reinterpret_cast<const char*>(op);
  for (int line = 0; line < 4; line++) __builtin_prefetch(bytes + 64 * line);
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// False if `timeout` went by; null waits for ever.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t expected, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, timeout, nullptr,
                 0) == 0 ||
         errno != ETIMEDOUT;
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace

Stream::Stream(int num_threads, bool caller_joins)
    : num_threads_(num_threads), caller_joins_(caller_joins) {
  if (num_threads < 1) throw std::invalid_argument("stream: num_threads must be at least 1");
  workers_.resize(static_cast<size_t>(num_threads));
  for (int w = 0; w < num_threads; w++) workers_[w].index = w;
  for (int w = caller_joins ? 1 : 0; w < num_threads; w++) {
    threads_.emplace_back([this, w] { worker_loop(workers_[w]); });
  }
}

Stream::~Stream() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  futex_wake_all(epoch_);
  for (auto& thread : threads_) thread.join();
}

uint64_t Stream::launch(const Plan& plan, std::shared_ptr<const Step> step) {
  LaunchPtr launch;
  {
    std::lock_guard lock(mutex_);
    // A launch is used again only when no worker still looks at it.
    for (size_t i = 0; i < free_.size(); i++) {
      if (free_[i].use_count() == 1) {
        launch = std::move(free_[i]);
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
  }
  if (!launch) launch = std::make_shared<Launch>();
  launch->ops.clear();
  launch->cache_readers.clear();
  size_t leader = 0;
  const auto& ops = plan.ops();
  for (size_t i = 0; i < ops.size(); i++) {
    // The weights of the last step have driven the ops out of the caches.
    if (i + kOpsAhead < ops.size()) prefetch(ops[i + kOpsAhead].get());
    const int chunks = ops[i]->num_chunks(*step);
    if (chunks == 0) continue;
    if (chunks == 1 && !launch->ops.empty()) {
      launch->ops[leader].riders++;
    } else {
      leader = launch->ops.size();
    }
    if (ops[i]->reads_cache()) launch->cache_readers.push_back(launch->ops.size());
    launch->ops.push_back({ops[i].get(), chunks, 0});
  }
  const size_t need = launch->ops.size() * static_cast<size_t>(num_threads_ + 1);
  if (launch->counters_size < need) {
    launch->counters = std::make_unique<Counter[]>(need);
    launch->counters_size = need;
  } else {
    for (size_t i = 0; i < need; i++) launch->counters[i].value.store(0, std::memory_order_relaxed);
  }
  // Drops the old step here, on the host's thread: it may hold the last reference to a Python object,
  // and a worker that needed the interpreter lock would stall behind the host, or deadlock with it.
  launch->step = std::move(step);
  launch->current_op.store(0, std::memory_order_relaxed);
  launch->failed.store(false, std::memory_order_relaxed);
  launch->error.clear();
  launch->op_end.assign(profiling_.load() ? launch->ops.size() : 0, 0);
  launch->started = launch->op_end.empty() ? 0 : now();
  launch->timed = timing_.load();
  launch->begun.store(0, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    launch->ticket = ++last_ticket_;
    queue_.push_back(launch);
  }
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(epoch_);
  return launch->ticket;
}

void Stream::wait(uint64_t ticket) {
  if (ticket > last_ticket_) throw std::invalid_argument("stream: no such launch");
  if (caller_joins_) {
    while (!done(ticket)) {
      LaunchPtr launch = next_launch(completed_.load(std::memory_order_acquire));
      if (!launch) continue;  // just completed by a helper
      execute(*launch, workers_[0]);
      finish(launch);
    }
  } else {
    for (int spins = 0; !done(ticket);) {
      if (++spins < kPausesBeforeYield) {
        pause();
      } else {
        sched_yield();
      }
    }
  }
  // Several launches of one step may have failed: the first one says why, and none of them may be
  // blamed on a later step.
  std::string message;
  std::lock_guard lock(mutex_);
  while (!errors_.empty() && errors_.front().first <= ticket) {
    if (message.empty()) message = std::move(errors_.front().second);
    errors_.erase(errors_.begin());
  }
  if (!message.empty()) throw std::runtime_error(message);
}

// The oldest launch with a ticket above `after`, or null.
Stream::LaunchPtr Stream::next_launch(uint64_t after) {
  std::lock_guard lock(mutex_);
  for (const auto& launch : queue_) {
    if (launch->ticket > after) return launch;
  }
  return nullptr;
}

void Stream::worker_loop(Worker& worker) {
  take_long_slices();
  uint64_t seen = 0;  // launches up to here are complete, as far as this thread is concerned
  bool rested = false;
  int64_t seen_at = now();
  while (true) {
    const int64_t last_seen = std::exchange(seen_at, now());
    if (seen_at - last_seen > kStoppedNanoseconds) rested = false;
    const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
    if (stopping_.load()) return;
    LaunchPtr launch = next_launch(seen);
    if (launch) {
      rested = false;
      execute(*launch, worker);
      seen = launch->ticket;
      finish(launch);
      continue;
    }
    const int64_t start = now();
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == epoch; spins++) {
      pause();
      if ((spins & 255) == 255 && now() - start > kSpinNanoseconds) {
        if (do_idle_work(rested)) break;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        rested = !futex_wait(epoch_, epoch, rested ? nullptr : &kRest);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        break;
      }
    }
  }
}

void Stream::set_idle_work(IdleWork piece) {
  {
    std::lock_guard lock(mutex_);
    idle_work_ = std::make_shared<const IdleWork>(std::move(piece));
  }
  epoch_.fetch_add(1);  // whoever sleeps looks again
  futex_wake_all(epoch_);
}

bool Stream::do_idle_work(bool rested) {
  std::shared_ptr<const IdleWork> piece;
  {
    std::lock_guard lock(mutex_);
    piece = idle_work_;
  }
  return piece && (*piece)(rested);
}

void Stream::run_chunk(Launch& launch, const OpRun& op, int chunk, Worker& worker) {
  if (launch.failed.load(std::memory_order_relaxed)) return;  // drain the counters only
  try {
    op.op->run(*launch.step, chunk, worker);
  } catch (const std::exception& e) {
    std::lock_guard lock(mutex_);
    if (!launch.failed.exchange(true)) {
      launch.error = std::string(op.op->name()) + ": " + e.what();
    }
  }
}

void Stream::run_riders(Launch& launch, size_t leader, Worker& worker) {
  const size_t end = leader + 1 + static_cast<size_t>(launch.ops[leader].riders);
  for (size_t i = leader + 1; i < end; i++) {
    run_chunk(launch, launch.ops[i], 0, worker);
    if (!launch.op_end.empty()) __atomic_store_n(&launch.op_end[i], now(), __ATOMIC_RELAXED);
  }
}

Stream::Range Stream::share(const OpRun& op, int worker) const {
  const auto part = [&](int w) { return static_cast<int>(static_cast<int64_t>(op.chunks) * w / num_threads_); };
  return {part(worker), part(worker + 1)};
}

Stream::Fetch Stream::fetch_behind(const Launch& launch, size_t op, int worker) const {
  const size_t end = std::min(launch.ops.size(), op + 1 + kOpsToWeights);
  for (size_t i = op + 1; i < end; i++) {
    const OpRun& next = launch.ops[i];
    const Range mine = share(next, worker);
    Stretch weights = next.op->weights(*launch.step, mine.begin, mine.end);
    if (weights.begin == weights.end) continue;
    weights.end = std::min(weights.end, weights.begin + kBytesOfWeights);
    return {i, weights};
  }
  return {end - 1, {}};
}

// From now on the worker's products fetch what it will read in the op that reads the KV cache next.
void Stream::look_ahead(const Launch& launch, size_t op, Worker& worker) const {
  worker.ahead.clear();
  const auto& readers = launch.cache_readers;
  const auto next = std::upper_bound(readers.begin(), readers.end(), op);
  if (next == readers.end()) return;
  const Range mine = share(launch.ops[*next], worker.index);
  launch.ops[*next].op->add_cached(*launch.step, mine.begin, mine.end, worker.ahead);
}

// Takes part in all remaining ops; returns when every one of them is complete.
void Stream::execute(Launch& launch, Worker& worker) {
  const bool timed = !launch.op_end.empty();
  const size_t n = launch.ops.size();
  Fetch fetch;
  const auto first = static_cast<size_t>(launch.current_op.load(std::memory_order_acquire));
  for (size_t i = first; i < n; i += 1 + static_cast<size_t>(launch.ops[i].riders)) {
    const OpRun& op = launch.ops[i];
    const int complete = op.chunks + (op.riders > 0 ? 1 : 0);  // riders count as one more chunk
    std::atomic<int32_t>& done = counter(launch, i, num_threads_).value;
    int finished = 0;
    if (i == first || op.op->reads_cache()) look_ahead(launch, i, worker);
    for (int k = 0; k < num_threads_; k++) {  // own range first, then steal
      int victim = worker.index + k;
      if (victim >= num_threads_) victim -= num_threads_;
      const auto [begin, end] = share(op, victim);
      std::atomic<int32_t>& next = counter(launch, i, victim).value;
      while (begin + next.load(std::memory_order_relaxed) < end) {
        const int chunk = begin + next.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= end) break;
        if (i == 0 && finished == 0 && launch.timed) {
          int64_t never = 0;
          launch.begun.compare_exchange_strong(never, now(), std::memory_order_relaxed);
        }
        run_chunk(launch, op, chunk, worker);
        finished++;
      }
    }
    // Before the count: whoever sees the op complete must see the time as well.
    if (timed && finished > 0) __atomic_store_n(&launch.op_end[i], now(), __ATOMIC_RELAXED);
    if (finished > 0 && done.fetch_add(finished, std::memory_order_acq_rel) + finished == op.chunks) {
      if (op.riders > 0) {
        run_riders(launch, i, worker);
        done.fetch_add(1, std::memory_order_release);
      }
      launch.current_op.store(static_cast<int32_t>(i) + 1 + op.riders, std::memory_order_release);
      continue;
    }
    for (int spins = 0; done.load(std::memory_order_acquire) < complete;) {
      if (fetch.op <= i) fetch = fetch_behind(launch, i, worker.index);
      if (fetch.rest.begin < fetch.rest.end) {
        for (std::ptrdiff_t b = 0; b < kFetchPiece; b += 64) __builtin_prefetch(fetch.rest.begin + b, 0, 2);
        fetch.rest.begin += kFetchPiece;
      } else if (++spins < kPausesBeforeYield) {
        pause();
      } else {
        sched_yield();
      }
    }
  }
}

// Called by every thread that leaves a launch; the first one retires it.
void Stream::finish(const LaunchPtr& launch) {
  std::lock_guard lock(mutex_);
  if (completed_.load(std::memory_order_relaxed) >= launch->ticket) return;
  if (launch->failed.load()) errors_.emplace_back(launch->ticket, launch->error);
  if (launch->timed) note_span(*launch);
  if (!launch->op_end.empty()) {
    int64_t before = std::max(launch->started, last_end_);
    last_end_ = launch->op_end.back();
    for (size_t i = 0; i < launch->ops.size(); i++) {
      const char* name = launch->ops[i].op->name();
      ProfileRow* row = nullptr;
      for (auto& candidate : profile_) {
        if (candidate.name == name) row = &candidate;
      }
      if (!row) row = &profile_.emplace_back(ProfileRow{name, 0, 0});
      row->nanoseconds += static_cast<double>(launch->op_end[i] - before);
      row->runs++;
      before = launch->op_end[i];
    }
  }
  queue_.pop_front();  // launches complete in order
  free_.push_back(launch);
  completed_.store(launch->ticket, std::memory_order_release);
}

// The mutex is held. A launch without work has a span of no length.
void Stream::note_span(const Launch& launch) {
  const int64_t end = now(), begun = launch.begun.load(std::memory_order_relaxed);
  if (spans_.size() == kMaxSpans) spans_.pop_front();
  spans_.push_back({launch.ticket, begun == 0 ? end : begun, end});
}

std::vector<Stream::Span> Stream::take_spans(uint64_t first, uint64_t last) {
  std::lock_guard lock(mutex_);
  std::vector<Span> taken;
  while (!spans_.empty() && spans_.front().ticket <= last) {
    if (spans_.front().ticket >= first) taken.push_back(spans_.front());
    spans_.pop_front();
  }
  return taken;
}

std::vector<Stream::ProfileRow> Stream::profile() {
  std::lock_guard lock(mutex_);
  return std::exchange(profile_, {});
}

}  // namespace twostep
