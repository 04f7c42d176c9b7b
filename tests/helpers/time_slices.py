"""The time slices that threads have asked for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
SCHED_ATTR = "IIQiIQQQII"
"""struct sched_attr of sched_setattr(2); its sixth is sched_runtime, which the kernel gives for
usual threads from Linux 6.12 on."""


def time_slices(pid: int) -> dict[int, int]:
    """Nanoseconds by thread of a process; all 0 where threads cannot choose."""
    return {int(tid): time_slice(int(tid)) for tid in os.listdir(Path("/proc", str(pid), "task"))}


def time_slice(tid: int = 0) -> int:
    """Of one thread, by default of the caller."""
    attr = ctypes.create_string_buffer(struct.calcsize(SCHED_ATTR))
    number = SCHED_GETATTR[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(number, tid, attr, len(attr), 0) != 0:
        raise OSError(ctypes.get_errno(), "sched_getattr")
    return int(struct.unpack(SCHED_ATTR, attr.raw)[5])
