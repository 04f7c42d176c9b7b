"""Devices as a handful of numbers.

Peaks are dense ones (without structured sparsity) from the vendors' public data sheets:

* H100, H200: "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU" data sheets, SXM;
* A100: "NVIDIA A100 Tensor Core GPU" data sheet, SXM (40 GB: 1,555 GB/s, 80 GB: 2,039 GB/s);
* L4: "NVIDIA L4 Tensor Core GPU" data sheet (its peaks are given with sparsity: halved here).

A sheet's "80 GB" of memory is read as 80 GiB, as the driver counts it (to 1-2 %).

What share of a peak is reached, and what a launch costs, stands on no data sheet. The values here
are assumptions for planning, the same for all GPUs; measured ones go in by
``msgspec.structs.replace``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from twostep.contracts.errors import UsageError
from twostep.runner.graphs import MAX_CAPTURE_SIZE, GraphMode

GIB = 1 << 30
TERA = 1e12
GIGA = 1e9


class SimDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's time is computed from. Seconds, bytes, FLOP/s, bytes/s."""

    name: str
    peak_flops: Mapping[str, float]
    """FLOP/s of matrix products by the numbers' type: bf16, fp8, int8, ..."""
    memory_bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    """To the other devices of a tensor-parallel group, one direction, bytes/s."""
    compute_efficiency: float = 0.70
    """Share of ``peak_flops`` that large matrix products reach."""
    bandwidth_efficiency: float = 0.85
    """Share of ``memory_bandwidth`` that streaming weights and KV reaches."""
    kernel_launch: float = 4e-6
    """Of one kernel that is launched on its own."""
    graph_launch: float = 10e-6
    """Of one replay of a captured graph, however many kernels are in it."""
    graph_kernel: float = 1e-6
    """Between two kernels of one graph."""
    link_latency: float = 5e-6
    """Of one collective operation."""
    graph_mode: GraphMode = GraphMode.FULL_AND_PIECEWISE
    max_capture_size: int | None = MAX_CAPTURE_SIZE
    """Tokens of the largest captured graph; None if any batch is replayed without padding."""
    is_a100: bool = False
    """vLLM gives these smaller default batches than their memory would."""
    is_cpu: bool = False

    def flops(self, dtype: str) -> float:
        """FLOP/s that matrix products in ``dtype`` reach. Raises UsageError if it has none."""
        if dtype not in self.peak_flops:
            raise UsageError(
                f"{self.name} has no {dtype} arithmetic: choose {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype] * self.compute_efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes/s that streaming reaches."""
        return self.memory_bandwidth * self.bandwidth_efficiency


def _peaks(**teraflops: float) -> Mapping[str, float]:
    return MappingProxyType({dtype: value * TERA for dtype, value in teraflops.items()})


_HOPPER = _peaks(bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
_A100 = _peaks(bf16=312, fp16=312, int8=624)

H100 = SimDevice(
    name="H100 80 GiB",
    peak_flops=_HOPPER,
    memory_bandwidth=3350 * GIGA,
    memory_bytes=80 * GIB,
    link_bandwidth=450 * GIGA,
)
H200 = SimDevice(
    name="H200 141 GiB",
    peak_flops=_HOPPER,
    memory_bandwidth=4800 * GIGA,
    memory_bytes=141 * GIB,
    link_bandwidth=450 * GIGA,
)
A100_40 = SimDevice(
    name="A100 40 GiB",
    peak_flops=_A100,
    memory_bandwidth=1555 * GIGA,
    memory_bytes=40 * GIB,
    link_bandwidth=300 * GIGA,
    is_a100=True,
)
A100_80 = SimDevice(
    name="A100 80 GiB",
    peak_flops=_A100,
    memory_bandwidth=2039 * GIGA,
    memory_bytes=80 * GIB,
    link_bandwidth=300 * GIGA,
    is_a100=True,
)
L4 = SimDevice(
    name="L4 24 GiB",
    peak_flops=_peaks(bf16=121, fp16=121, fp8=242.5, int8=242.5),
    memory_bandwidth=300 * GIGA,
    memory_bytes=24 * GIB,
    link_bandwidth=32 * GIGA,
)

DEVICES: Mapping[str, SimDevice] = MappingProxyType(
    {"h100": H100, "h200": H200, "a100-40": A100_40, "a100-80": A100_80, "l4": L4}
)
"""By the name that users type."""

CPU_OP_OVERHEAD = 3e-6
"""Seconds to hand one op to the compute threads and to collect them again."""


def find_device(name: str) -> SimDevice:
    """The device of that name. Raises UsageError with the names there are."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise UsageError(f"unknown device {name!r}: one of {', '.join(DEVICES)} (or cpu)")
    return device


def cpu_device(
    *, name: str, memory_bandwidth: float, memory_bytes: int, peak_flops: Mapping[str, float]
) -> SimDevice:
    """A CPU from measurements: what was measured is what is reached, so no share is taken off.

    Its recorded plan is replayed with any number of tokens, op after op by threads of its own:
    a launch costs nothing, the ops between them do.
    """
    return SimDevice(
        name=name,
        peak_flops=MappingProxyType(dict(peak_flops)),
        memory_bandwidth=memory_bandwidth,
        memory_bytes=memory_bytes,
        link_bandwidth=memory_bandwidth,
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
        kernel_launch=2 * CPU_OP_OVERHEAD,
        graph_launch=CPU_OP_OVERHEAD,
        graph_kernel=CPU_OP_OVERHEAD,
        graph_mode=GraphMode.FULL,
        max_capture_size=None,
        is_cpu=True,
    )
