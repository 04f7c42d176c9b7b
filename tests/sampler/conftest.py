"""A native sample plan on its own: logits in, tokens out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from twostep.sampler.row_params import RowParams, stage_row


@dataclasses.dataclass
class Case:
    """One request at the moment of its next token."""

    params: RowParams
    history: list[int]
    row: int = -1
    """Permanent row; -1: the case's place in the batch."""


def int32(values: Sequence[int] | range) -> Any:
    return np.array(values, dtype=np.int32)


class NativeSampler:
    def __init__(
        self, isa: str, vocab: int, rows: int = 64, max_len: int = 64, threads: int = 1
    ) -> None:
        from twostep import _native

        self.native = _native
        self.device = _native.make_device(isa)
        self.vocab, self.max_len = vocab, max_len
        self.logits = _native.Rows(vocab, rows)
        self.state = _native.SampleState(rows, vocab, threads)
        self.table = _native.TokenTable(rows, max_len)
        self.plan = _native.Plan()
        _native.add_apply_staged(self.plan)
        _native.add_sample(self.plan, self.device, self.logits, self.state, self.table)
        self.stream = _native.Stream(threads)
        self.block_table = np.zeros((rows, max_len), dtype=np.int32)

    def step(self, lengths: Sequence[int], rows: Sequence[int]) -> Any:
        """A decode step: one token a request, which has ``lengths`` tokens by then."""
        n = len(lengths)
        every = int32(range(n))
        return self.native.make_step(
            self.device, n, int32(range(n + 1)), int32(lengths), int32(rows), every, every,
            self.block_table, 1,
        )  # fmt: skip

    def prefill(self, length: int, count: int, row: int = 0) -> Any:
        """A step of one request's last ``count`` of ``length`` tokens, all with logits."""
        return self.native.make_step(
            self.device, count, int32([0, count]), int32([length]), int32([row]),
            int32(range(count)), int32([0] * count), self.block_table, 1,
        )  # fmt: skip

    def stage(self, step: Any, row: int, case: Case) -> None:
        stage_row(self.state, step, row, case.history, case.params)
        step.stage_tokens(self.table, row, 0, int32(case.history))

    def set_logits(self, logits: Any) -> None:
        self.logits.numpy()[: len(logits)] = logits

    def launch(self, step: Any) -> int:
        ticket: int = self.stream.launch(self.plan, step)
        return ticket

    def run(self, logits: Any, cases: Sequence[Case], bitmask: Any = None) -> Any:
        """Stage every case, then sample each: row m of ``logits`` is case m's."""
        rows = [m if case.row < 0 else case.row for m, case in enumerate(cases)]
        step = self.step([len(case.history) for case in cases], rows)
        for row, case in zip(rows, cases, strict=True):
            self.stage(step, row, case)
        sampled = self.native.SampleStep(step)
        if bitmask is not None:
            sampled.set_bitmask(*bitmask)
        self.set_logits(logits)
        self.stream.wait(self.launch(step))
        return sampled


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        from twostep import _native

        metafunc.parametrize("isa", _native.cpu_info()["isas"])


@pytest.fixture
def make_sampler(isa: str) -> Callable[..., NativeSampler]:
    """NativeSampler(vocab, rows, max_len, threads) on each instruction set."""

    def make(vocab: int, **sizes: int) -> NativeSampler:
        return NativeSampler(isa, vocab, **sizes)

    return make


@pytest.fixture
def case() -> type[Case]:
    return Case


def random_params(rng: np.random.Generator, vocab: int, prompt_len: int) -> RowParams:
    """Any combination of features, each on in about a third of the rows."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.35 else off

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.choice(vocab, size=min(count, vocab), replace=False)]

    bias = maybe(ids(int(rng.integers(1, 9))), [])
    return RowParams(
        prompt_len=prompt_len,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        temperature=maybe(0.0, float(rng.uniform(0.05, 2.0))),
        top_k=maybe(int(rng.integers(1, vocab + 3)), 0),
        top_p=maybe(float(rng.uniform(0.01, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        bias_ids=bias,
        bias_values=[float(v) for v in rng.uniform(-150, 150, size=len(bias))],
        allowed_ids=maybe(ids(int(rng.integers(1, 40))), []),
        bad_words=maybe([ids(1), ids(2), ids(3)], []),
        stop_ids=maybe(ids(3), []),
        min_tokens=int(rng.integers(0, 6)),
        num_logprobs=maybe(int(rng.integers(0, 21)), -1),
    )


def random_logits(rng: np.random.Generator, vocab: int) -> Any:
    """Flat, peaked, full of ties, or with tokens that are ruled out."""
    x = rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 4.0, 30.0])
    kind = rng.integers(4)
    if kind == 1:
        x = np.round(x)
    elif kind == 2:
        x[rng.random(vocab) < 0.5] = -np.inf
        x[rng.integers(vocab)] = 1.0
    elif kind == 3:
        x[rng.integers(vocab)] += 20.0
    return x.astype(np.float32)


@pytest.fixture
def random_batch() -> Callable[[np.random.Generator, int, int], tuple[Any, list[Case]]]:
    """(rng, vocab, rows) → logits [rows, vocab] and as many cases."""

    def make(rng: np.random.Generator, vocab: int, rows: int) -> tuple[Any, list[Case]]:
        cases = []
        for _ in range(rows):
            prompt_len, outputs = int(rng.integers(1, 12)), int(rng.integers(0, 12))
            # A few distinct tokens, so that words repeat.
            history = rng.integers(0, min(vocab, 8), size=prompt_len + outputs).tolist()
            cases.append(Case(random_params(rng, vocab, prompt_len), history))
        return np.stack([random_logits(rng, vocab) for _ in range(rows)]), cases

    return make
