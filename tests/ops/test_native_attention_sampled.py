"""Attention of the sampled tokens alone, as behind the last layer: the bytes of all tokens'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from twostep.config.model import RopeConfig
from twostep.ops.reference.rope import rope_tables

native = pytest.importorskip("twostep._native")
pytestmark = pytest.mark.native

ISAS = native.cpu_info()["isas"]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WIDTH, QKV_WIDTH = HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM
MAX_TOKENS = 128


class SampledMachine:
    """Two attentions over one layer's queries: of all tokens, and of the sampled ones."""

    def __init__(self, isa: str, form: Any, num_threads: int = 2) -> None:
        self.device = native.make_device(isa)
        self.form = form
        table = native.RopeTable(*rope_tables(RopeConfig(theta=1e4, rotary_dim=HEAD_DIM), 2048))
        self.stream = native.Stream(num_threads)
        self.plans, self.qkv, self.outs, self.acts = {}, {}, {}, {}
        for queries in (native.RowSet.Tokens, native.RowSet.Logits):
            cache = native.KVCache(self.device, 1, KV_HEADS, HEAD_DIM, 280, dtype="fp32")
            plan = self.plans[queries] = native.Plan()
            qkv = self.qkv[queries] = native.Rows(QKV_WIDTH, MAX_TOKENS)
            out = self.outs[queries] = native.Rows(WIDTH, MAX_TOKENS)
            act = self.acts[queries] = native.ActBuffer(form, WIDTH, MAX_TOKENS)
            rope = native.add_rope_cache(
                plan, self.device, cache, 0, qkv, None, table, num_heads=HEADS,
                scale=HEAD_DIM**-0.5, may_sample=queries == native.RowSet.Logits,
            )  # fmt: skip
            native.add_attention(
                plan, self.device, cache, 0, None, rope=rope, num_heads=HEADS,
                num_threads=num_threads, queries=queries, rows=out, acts=[act],
            )  # fmt: skip

    def check(
        self,
        qkv: np.ndarray,
        counts: list[int],
        lengths: list[int],
        sampled: list[tuple[int, int]],
        blocks: np.ndarray,
    ) -> None:
        """One step of requests with `counts` tokens each, `lengths` long with them; `sampled` are
        (flat token, request) of the logits rows."""
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        indices = [token for token, _ in sampled]
        results = []
        for queries, plan in self.plans.items():
            self.qkv[queries].numpy()[: len(qkv)] = qkv
            step = native.make_step(
                self.device, len(qkv), starts, np.asarray(lengths, np.int32),
                np.arange(len(counts), dtype=np.int32), np.asarray(indices, np.int32),
                np.asarray([request for _, request in sampled], np.int32), blocks, 16,
            )  # fmt: skip
            self.outs[queries].numpy()[:] = np.nan
            self.stream.wait(self.stream.launch(plan, step))
            rows = self.outs[queries].numpy().copy()
            acts = self.acts[queries].dequantize(step, queries)
            results.append((rows, acts))
        (want, want_acts), (got, got_acts) = results
        np.testing.assert_array_equal(
            got[: len(indices)].view(np.uint32), want[indices].view(np.uint32)
        )
        np.testing.assert_array_equal(got_acts, want_acts[indices])
        assert np.isnan(got[len(indices) :]).all(), "nobody else attends"


def draw(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, QKV_WIDTH), np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [native.ActForm.Q8, native.ActForm.BF16], ids=str)
def test_last_tokens_and_scored_ones(isa: str, form: Any) -> None:
    """Two prompts in chunks beside a decode: what is sampled is the last token, nothing at all, a
    run of scored tokens longer than a tile, and scored tokens that do not follow each other."""
    machine = SampledMachine(isa, form)
    blocks = 1 + np.random.default_rng(3).permutation(3 * 40).astype(np.int32).reshape(3, 40)
    machine.check(draw(91, 1), [1, 30, 60], [1, 30, 60], [(0, 0), (30, 1), (90, 2)], blocks)
    machine.check(draw(101, 2), [1, 40, 60], [2, 70, 120], [], blocks)
    scored = [(0, 0), (100, 2), *[(41 + i, 2) for i in range(59)]]
    machine.check(draw(101, 3), [1, 40, 60], [3, 110, 180], scored, blocks)
    apart = [(2, 1), (3, 1), (7, 1), (8, 1), (9, 1), (50, 2), (40, 1)]
    machine.check(draw(101, 4), [1, 40, 60], [4, 150, 240], apart, blocks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sampled", [[0, 1, 2, 3, 4], [0, 2, 3], [], [4, 3, 2, 1, 0], [4]], ids=str)
def test_lone_tokens_that_are_not_sampled_are_cached(isa: str, sampled: list[int]) -> None:
    """One token of each request, some of them unfinished prompts, step after step: whoever is
    sampled later reads the keys of tokens that were not."""
    machine = SampledMachine(isa, native.ActForm.Q8)
    blocks = 1 + np.random.default_rng(4).permutation(5 * 4).astype(np.int32).reshape(5, 4)
    for position in range(40):
        machine.check(
            draw(5, position), [1] * 5, [position + 1] * 5, [(i, i) for i in sampled], blocks
        )
    machine.check(draw(5, 99), [1] * 5, [41] * 5, [(i, i) for i in range(5)], blocks)


def test_queries_that_all_tokens_attend_with_cannot_be_sampled() -> None:
    device = native.make_device()
    cache = native.KVCache(device, 1, KV_HEADS, HEAD_DIM, 8, dtype="fp32")
    table = native.RopeTable(np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
    plan = native.Plan()
    rope = native.add_rope_cache(
        plan, device, cache, 0, native.Rows(QKV_WIDTH, 4), None, table, num_heads=HEADS, scale=1.0
    )
    with pytest.raises(ValueError, match="rope is for an attention of all tokens"):
        native.add_attention(
            plan, device, cache, 0, None, rope=rope, num_heads=HEADS, num_threads=1,
            queries=native.RowSet.Logits, rows=native.Rows(WIDTH, 4),
        )  # fmt: skip
