// How long a thread that computes may keep a core while others wait for it.
#pragma once

namespace twostep {

// Asks the system for long time slices for the calling thread, so that whoever wakes up with a usual one
// runs at once instead of waiting for ours to end: the process that sends a token on has 0.1 ms of work,
// and the slice of a thread that computes is milliseconds. The share of the core stays the same.
//
// Linux from 6.12 on (EEVDF: the shorter slice has the earlier deadline, and wakes up into it; see
// sched_setattr(2), sched_runtime of SCHED_OTHER); elsewhere, and for a thread whose policy somebody
// chose, nothing changes. Threads started by this one get usual slices.
void take_long_slices();

}  // namespace twostep
