#include "parallel/time_slice.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace twostep {

namespace {

// A few times the system's own 0.7 to 6 ms; it allows 100 ms.
constexpr uint64_t kSliceNanoseconds = 20'000'000;
constexpr uint64_t kResetOnFork = 1;  // SCHED_FLAG_RESET_ON_FORK

// struct sched_attr of the kernel's interface; glibc 2.41 was the first to declare it.
struct SchedAttr {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};

}  // namespace

void take_long_slices() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;
  errno = 0;
  const int nice = getpriority(PRIO_PROCESS, 0);  // of this thread; the call below sets it as well
  if (errno != 0) return;
  SchedAttr attr{sizeof(SchedAttr), SCHED_OTHER, kResetOnFork, nice, 0, kSliceNanoseconds, 0, 0};
  syscall(SYS_sched_setattr, 0, &attr, 0);  // a system that refuses computes as before
}

}  // namespace twostep
