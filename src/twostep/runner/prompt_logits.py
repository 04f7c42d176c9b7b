"""Logits of every position of a text: what quality measurements and parity tests look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twostep.ops.cpu.device_model import SCORE, CpuModel, LogitsRows


def prompt_logits(
    model: CpuModel, token_ids: Sequence[int], *, first: int = 0, chunk: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """Run one text through the model and yield its logits, position by position.

    Uses row 0 and blocks 1.., so nothing else may be running or cached.

    Args:
        model: A recorded model whose KV cache holds the text.
        token_ids: The text; at most ``max_model_len`` tokens.
        first: Positions before this one are computed but not yielded.
        chunk: Tokens of one step; by default as many as fit.

    Yields:
        float32 [n, V] for the next n positions, at most ``max_logits_rows``; a view that the
        next step overwrites.

    Raises:
        ValueError: The text does not fit the KV cache.
    """
    limits = model.limits
    num_blocks = -(-len(token_ids) // limits.block_size)
    if num_blocks >= limits.num_blocks:
        raise ValueError(f"{len(token_ids)} tokens need {num_blocks} blocks, too many")
    block_table = np.arange(1, num_blocks + 1, dtype=np.int32)[None, :]
    ids = np.asarray(token_ids, dtype=np.int32)
    size = min(chunk or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        wanted = list(range(max(first - start, 0), end - start))
        logits = LogitsRows(indices=wanted, requests=[0] * len(wanted), kinds=[SCORE] * len(wanted))
        for number, row in enumerate(range(0, max(len(wanted), 1), limits.max_logits_rows)):
            step, _ = model.make_step(
                end - start,
                [0, end - start],
                [end],
                [0],
                block_table,
                logits,
                slice(row, row + limits.max_logits_rows),
            )
            if number == 0:
                step.stage_tokens(model.token_table, 0, start, ids[start:end])
                model.stream.wait(model.stream.launch(model.forward_plan, step))
            count = len(wanted[row : row + limits.max_logits_rows])
            if count:
                model.stream.wait(model.stream.launch(model.logits_plan, step))
                yield model.logits_rows.numpy()[:count]
