"""``twostep doctor MODEL``: what share of the machine's roofline a model reaches here."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from twostep.entrypoints.progress import Reporter
from twostep.entrypoints.resolve import ResolvedModel

BATCHES = (1, 16)
CONTEXT = 256
STEPS = 32
PREFILL = 512
ROUNDS = 5


def make_llm(path: str, **options: Any) -> Any:
    """The real engine; imported only now, so that ``doctor`` alone stays quick."""
    from twostep.entrypoints.llm import LLM

    return LLM(path, **options)


def examine_model(
    model: ResolvedModel,
    name: str,
    roofline: dict[str, Any],
    *,
    threads: int,
    quantization: str | None,
    isa: str,
    reporter: Reporter,
    make: Callable[..., Any] = make_llm,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Load the model, time it, and hold the times against the roof. Ready for JSON.

    ``roofline`` is what ``doctor.measure_roofline`` found. A cell has ``tokens_per_second`` and
    ``seconds`` (medians), ``bytes``, ``operations`` (by kind), ``intensity`` (operations per byte),
    ``gop_s`` (reached), ``bound_seconds``, ``bound_by`` and ``share`` (bound over measured).
    """
    from twostep.entrypoints.model_speed import decode_seconds, prefill_seconds
    from twostep.entrypoints.roofline import ModelWork, Roof
    from twostep.models.loader.open import open_checkpoint

    roof = Roof(
        bandwidth=roofline["bandwidth_gb_s"][str(threads)] * 1e9,
        rates={kind: rates[str(threads)] * 1e9 for kind, rates in roofline["gop_s"].items()},
    )
    with contextlib.closing(open_checkpoint(model.path)) as checkpoint:
        vocab, longest = checkpoint.config.vocab_size, checkpoint.config.max_position
        context = min(CONTEXT, longest // 2)
        prefill = min(PREFILL, longest - 1)
        length = min(longest, max(context + STEPS + 1, prefill + 1))
        steps = min(STEPS, length - context - 1)
        with make(
            str(model.path),
            threads=threads,
            quantization=quantization,
            max_num_seqs=max(BATCHES),
            max_model_len=length,
        ) as llm:
            work = ModelWork(
                checkpoint,
                quantization=quantization,
                kv_dtype=llm.boot.kv_dtype,
                has_bf16_dot=isa in ("avx512", "amx"),
            )
            budget = llm.boot.largest_step  # a short prompt that is alone is a crowd
            cells = []
            with reporter.count("measuring", len(BATCHES) + 1, "cells") as advance:
                for batch in BATCHES:
                    seconds = decode_seconds(llm, batch, context, steps, vocab, ROUNDS, clock)
                    need = work.decode(batch, context + steps // 2)
                    cells.append(cell(f"decode B={batch}", batch, seconds, need, roof))
                    advance(len(cells))
                seconds = prefill_seconds(llm, prefill, vocab, ROUNDS, clock)
                need = work.prefill(prefill, budget)
                cells.append(cell(f"prefill {prefill}", prefill, seconds, need, roof))
                advance(len(cells))
            weights = llm.boot.weight_bytes
    return {"model": name, "weight_bytes": weights, "context": context, "cells": cells}


def cell(name: str, tokens: int, rounds: list[float], need: Any, roof: Any) -> dict[str, Any]:
    """One line of the report: ``tokens`` in the median of ``rounds`` seconds."""
    seconds = statistics.median(rounds)
    bound, bound_by = roof.seconds(need)
    return {
        "name": name,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "bytes": need.num_bytes,
        "operations": dict(need.operations),
        "intensity": need.intensity,
        "gop_s": need.total_operations / seconds / 1e9,
        "bound_seconds": bound,
        "bound_by": bound_by,
        "share": bound / seconds,
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table for people."""
    lines = [[found["model"], f"{found['weight_bytes'] / 1e6:.0f} MB of weights, packed"]]
    for one in found["cells"]:
        operations = sum(one["operations"].values())
        lines.append(
            [
                one["name"],
                f"{one['tokens_per_second']:.1f} tokens/s: {one['share']:.0%} of the roofline "
                f"({one['bytes'] / 1e6:.0f} MB, {operations / 1e9:.2f} GOP: "
                f"{one['bound_seconds'] * 1e3:.2f} ms by {one['bound_by']}; "
                f"took {one['seconds'] * 1e3:.2f} ms)",
            ]
        )
    return lines
