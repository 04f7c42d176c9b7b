"""Idle threads take the KV cache's next memory from the system, and no more; weights that came in
small pages they put on huge ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from twostep import _native as native

MIB = 1 << 20
AHEAD = 64 * MIB
LAYERS, KV_HEADS, HEAD_DIM = 16, 2, 64
RUN_BYTES = 32 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 16 * 2  # what 32 blocks hold
OTHERS = 8 * MIB  # what else of a process may come to huge pages, or leave them: arrays, the heap


def wait_for_touched(cache: native.KVCache, size: int) -> None:
    end = time.monotonic() + 50
    while cache.touched_bytes < size and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)  # a thread that would go too far has time to
    assert cache.touched_bytes == size


def test_idle_threads_touch_what_is_written_next() -> None:
    device = native.make_device("")
    cache = native.KVCache(device, LAYERS, KV_HEADS, HEAD_DIM, 32 * 80, dtype="bf16")
    stream = native.Stream(2)
    assert cache.touched_bytes == 0
    stream.tend_when_idle(cache)
    wait_for_touched(cache, AHEAD)
    write(stream, device, cache, block=32 * 3 + 1)
    wait_for_touched(cache, 4 * RUN_BYTES + AHEAD)
    write(stream, device, cache, block=1)  # further down: nothing new
    wait_for_touched(cache, 4 * RUN_BYTES + AHEAD)
    write(stream, device, cache, block=32 * 34)
    wait_for_touched(cache, 2 * 35 * RUN_BYTES)  # as much again as is in use
    write(stream, device, cache, block=32 * 79)
    wait_for_touched(cache, 80 * RUN_BYTES)  # all there is


def test_touching_changes_nothing() -> None:
    """Blocks that were written before idle threads come by keep what they hold."""
    device = native.make_device("")
    found = []
    for touched in (False, True):
        cache = native.KVCache(device, LAYERS, KV_HEADS, HEAD_DIM, 64, dtype="bf16")
        stream = native.Stream(2)
        write(stream, device, cache, block=5)
        if touched:
            stream.tend_when_idle(cache)
            wait_for_touched(cache, 2 * RUN_BYTES)
        found.append(attend(stream, device, cache, block=5))
    assert found[0].any()
    assert np.array_equal(found[0], found[1])


def huge_bytes(process: int | str = "self") -> int:
    """What a process has on huge pages."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in rollup if line.startswith("AnonHugePages")) * 1024


def packed(device: native.Device, arena: native.Arena) -> native.Weight:
    """24 MiB of weights, three times what others may take."""
    values = np.random.default_rng(1).integers(0, 1 << 14, 4096 * 3072, np.uint16)
    part = ("BF16", 4096, 3072, values.view(np.uint8))
    return native.Weight(device, [part], "bf16", 2, arena)


def skip_without_huge_pages() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this system has no huge pages")


def test_weights_in_small_pages_move_to_huge_ones_after_a_rest() -> None:
    """Not before: a process that answers once does not wait for it. Weights stay what they are."""
    skip_without_huge_pages()
    device = native.make_device("")
    cache = native.KVCache(device, LAYERS, KV_HEADS, HEAD_DIM, 32, dtype="bf16")
    stream = native.Stream(2)
    arena = native.Arena(dear_nanoseconds=-1)
    before = huge_bytes()
    weight = packed(device, arena)
    rows = np.arange(0, 4096, 37, dtype=np.int32)
    values = weight.unpack_rows(rows)
    assert huge_bytes() - before < OTHERS
    stream.tend_when_idle(cache, arena)
    busy_until = time.monotonic() + 0.5
    while time.monotonic() < busy_until:  # what takes long is not done between two steps
        write(stream, device, cache, block=1)
        time.sleep(0.002)
    with_cache = huge_bytes()
    assert with_cache - before <= RUN_BYTES + OTHERS
    wait_for_huge_bytes("self", with_cache + 16 * MIB)
    assert np.array_equal(weight.unpack_rows(rows), values)


def wait_for_huge_bytes(process: int | str, size: int) -> None:
    end = time.monotonic() + 50
    while huge_bytes(process) < size and time.monotonic() < end:
        time.sleep(0.01)
    assert huge_bytes(process) >= size


STOPPED = """
import sys
from tests.ops.test_native_idle_work import *
device = native.make_device("")
cache = native.KVCache(device, LAYERS, KV_HEADS, HEAD_DIM, 32, dtype="bf16")
stream, arena = native.Stream(2), native.Arena(dear_nanoseconds=-1)
weight = packed(device, arena)
print(huge_bytes(), flush=True)
stream.tend_when_idle(cache, arena)
write(stream, device, cache, block=1)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_has_not_rested() -> None:
    """One that waits its turn in a comparison (SIGSTOP) had 25 ms of such work before its own."""
    skip_without_huge_pages()
    command = [sys.executable, "-c", STOPPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            before = int(child.stdout.readline())
            assert child.stdout.readline() == "ready\n"
            for _ in range(6):
                os.kill(child.pid, signal.SIGSTOP)
                time.sleep(0.4)
                os.kill(child.pid, signal.SIGCONT)
                time.sleep(0.05)
            assert huge_bytes(child.pid) - before <= RUN_BYTES + OTHERS
            wait_for_huge_bytes(child.pid, before + 16 * MIB)
        finally:
            child.kill()


def test_weights_lie_on_huge_pages_at_once_where_those_are_cheap() -> None:
    before = huge_bytes()
    weight = packed(native.make_device(""), native.Arena(dear_nanoseconds=1 << 60))
    if huge_bytes() == before:
        pytest.skip("this system gives no huge pages")
    assert huge_bytes() - before >= weight.nbytes - OTHERS


def step_of_one_token(device: native.Device, block: int) -> native.Step:
    none = np.zeros(0, np.int32)
    return native.make_step(
        device,
        1,
        np.array([0, 1], np.int32),
        np.array([1], np.int32),
        np.zeros(1, np.int32),
        none,
        none,
        np.array([[block]], np.int32),
        16,
    )


def write(stream: native.Stream, device: native.Device, cache: native.KVCache, block: int) -> None:
    qkv, q = native.Rows(3 * KV_HEADS * HEAD_DIM, 1), native.Rows(KV_HEADS * HEAD_DIM, 1)
    qkv.numpy()[:] = np.random.default_rng(0).standard_normal(qkv.numpy().shape, np.float32)
    angles = np.zeros((16, HEAD_DIM // 2), np.float32)
    rope = native.RopeTable(np.cos(angles), np.sin(angles))
    plan = native.Plan()
    native.add_rope_cache(
        plan, device, cache, 0, qkv, q, rope, num_heads=KV_HEADS, scale=1.0, interleaved=True
    )
    stream.wait(stream.launch(plan, step_of_one_token(device, block)))


def attend(
    stream: native.Stream, device: native.Device, cache: native.KVCache, block: int
) -> np.ndarray:
    q, out = (native.Rows(KV_HEADS * HEAD_DIM, 1) for _ in range(2))
    q.numpy()[:] = 1
    plan = native.Plan()
    native.add_attention(plan, device, cache, 0, q, num_heads=KV_HEADS, num_threads=2, rows=out)
    stream.wait(stream.launch(plan, step_of_one_token(device, block)))
    return out.numpy().copy()
