"""Random users: from a seed to a case. Knows nothing of what the engine will do with it."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

from twostep.sim.case import (
    Abort,
    Add,
    Case,
    CaseConfig,
    ClockJump,
    Event,
    FaultKind,
    Glitch,
    GlitchKind,
    Pause,
    ResetCache,
    Resume,
)
from twostep.sim.ghost_model import VOCAB

_FAULTS: tuple[FaultKind, ...] = ("execute", "sample", "result", "nan", "lost")
_PAUSES: tuple[Literal["abort", "wait", "keep"], ...] = ("abort", "wait", "keep")
_GLITCHES: tuple[GlitchKind, ...] = (
    "execute",
    "sample",
    "result",
    "interrupt launch",
    "interrupt sampling",
    "interrupt wait",
)


def make_case(seed: int, steps: int, *, is_async: bool) -> Case:
    """The case of a seed: a swarm configuration and some events for each of ``steps`` steps.

    Each seed switches kinds of events on and off, so that rare mixtures come up too.
    """
    rng = random.Random(f"twostep {seed} {is_async}")
    config = _swarm_config(rng, is_async=is_async)
    # What came later has a generator of its own: seeds keep their other events.
    later = random.Random(f"burst {seed} {is_async}")
    if later.random() < 0.6:
        config = msgspec.structs.replace(config, prefill_burst=_log_uniform(later, 1, 2048))
        if later.random() < 0.5:
            config = msgspec.structs.replace(config, crowd_step=_log_uniform(later, 1, 1024))
    return Case(
        config=config, events=tuple(_Users(rng, config).events(steps)), steps=steps, seed=seed
    )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _swarm_config(rng: random.Random, *, is_async: bool) -> CaseConfig:
    block_size = rng.choice((1, 2, 3, 4, 8, 16, 32))
    num_blocks = _log_uniform(rng, 16, 512)
    pool_tokens = (num_blocks - 1) * block_size
    longest = rng.choice((24, 48, 100, 200))
    max_model_len = max(4, min(longest, int(pool_tokens * rng.uniform(0.3, 1.3))))
    budget = _log_uniform(rng, 1, 512)
    chunked_prefill = rng.random() < 0.85
    if not chunked_prefill:
        budget = max(budget, max_model_len)
    max_num_seqs = _log_uniform(rng, 1, 64)
    return CaseConfig(
        is_async=is_async,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_model_len=max_model_len,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        caching=rng.random() < 0.75,
        window=rng.choice((2, 5, 17, 40)) if rng.random() < 0.15 else None,
        num_spec_tokens=rng.randint(1, 4) if rng.random() < 0.3 else 0,
        long_prefill_threshold=rng.choice((1, 5, 16)) if rng.random() < 0.25 else 0,
        chunked_prefill=chunked_prefill,
        full_sequence_must_fit=rng.random() < 0.6,
        watermark=rng.choice((0.02, 0.1)) if rng.random() < 0.15 else 0.0,
        kv_events=rng.random() < 0.1,
        max_live=2 * max_num_seqs + 6,
    )


class _Users:
    """Makes up events, step by step."""

    def __init__(self, rng: random.Random, config: CaseConfig) -> None:
        self.rng = rng
        self.config = config
        self.num_texts = rng.randint(1, 4)
        self.num_salts = rng.choice((1, 1, 2, 3))
        self.num_clients = rng.choice((1, 1, 3))
        self.max_prompt = max(1, int(config.max_model_len * rng.choice((0.2, 0.5, 0.9, 1.0))))
        self.max_output = max(1, int(config.max_model_len * rng.choice((0.2, 0.5, 0.9))))
        self.burst = rng.choice((1, 1, 3, 8))
        self.fault_share = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.abort_share = rng.choice((0.0, 0.1, 0.3))
        self.glitch_rate = rng.choice((0.0, 0.0, 0.002, 0.01))
        self.reset_rate = rng.choice((0.0, 0.005, 0.02))
        self.logprob_share = rng.choice((0.0, 0.0, 0.2))
        self.group_share = rng.choice((0.0, 0.15))
        self.repeat_share = rng.choice((0.0, 0.3))
        self.grammar_share = rng.choice((0.0, 0.0, 0.1, 0.4))
        self.repetition_share = rng.choice((0.0, 0.0, 0.3))
        self.pause_rate = rng.choice((0.0, 0.0, 0.005))
        self.arrival_rate = self._sensible_rate()
        self.num_requests = 0
        self.resume_at = -1
        self.num_groups = 0
        self.recent: list[Add] = []
        self.aborts: dict[int, list[Abort]] = {}

    def _sensible_rate(self) -> float:
        """Requests per step: from half idle to hopelessly late."""
        config = self.config
        tokens = (self.max_prompt + self.max_output) / 2 + 1
        pool = (config.num_blocks - 1) * config.block_size / tokens
        together = min(config.max_num_seqs, config.budget, max(1.0, pool))
        rate = min(together / (self.max_output / 2 + 2), config.budget / tokens)
        return rate * self.rng.choice((0.7, 1.0, 1.5, 3.0))

    def events(self, steps: int) -> list[Event]:
        """All events of the run."""
        rng = self.rng
        found: list[Event] = []
        for step in range(steps):
            found += self.aborts.pop(step, ())
            if rng.random() < self.arrival_rate / self.burst:
                for _ in range(rng.randint(1, 2 * self.burst - 1)):
                    found += self._arrivals(step)
            if rng.random() < self.reset_rate:
                found.append(ResetCache(step=step, running=rng.random() < 0.6))
            if rng.random() < self.glitch_rate:
                found.append(Glitch(step=step, kind=rng.choice(_GLITCHES)))
            if rng.random() < self.pause_rate:
                found.append(Pause(step=step, mode=rng.choice(_PAUSES)))
                self.resume_at = step + rng.randint(0, 12)
            if step == self.resume_at:
                found.append(Resume(step=step))
            if rng.random() < 0.002:
                found.append(ClockJump(step=step, seconds=rng.choice((0.5, 60.0, 3600.0))))
        return found

    def _arrivals(self, step: int) -> list[Event]:
        """One request, or the branches of an n > 1; aborts of theirs are noted for later."""
        rng = self.rng
        first = self._request(step)
        adds = [first]
        if rng.random() < self.group_share:
            self.num_groups += 1
            first = self._copy(first, group=self.num_groups)
            branches = range(rng.randint(2, 4))
            adds = [self._copy(first, request_id=f"{first.request_id}.{i}") for i in branches]
        self.recent = [*self.recent, *adds][-12:]
        for add in adds:
            if rng.random() < self.abort_share:
                self._plan_abort(add)
        at_once = self.aborts.pop(step, ())
        return [*at_once, *adds] if rng.random() < 0.5 else [*adds, *at_once]

    def _plan_abort(self, add: Add) -> None:
        """At any stage of the request's life: before it, at once, soon, much later, twice."""
        rng = self.rng
        config = self.config
        life = 2 + self.max_output + self.max_prompt // config.budget
        for _ in range(1 if rng.random() < 0.9 else 2):
            delay = rng.choice((0, 1, 2, 3, rng.randint(1, life), rng.randint(1, 4 * life)))
            ids = [add.request_id]
            if rng.random() < 0.2:
                ids += [rng.choice(("nobody", add.request_id, self.recent[-1].request_id))]
            abort = Abort(
                step=add.step + delay, request_ids=tuple(ids), via_queue=rng.random() < 0.5
            )
            self.aborts.setdefault(abort.step, []).append(abort)

    def _request(self, step: int) -> Add:
        rng = self.rng
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if self.recent and rng.random() < 0.03:
            request_id = rng.choice(self.recent).request_id
        if self.recent and rng.random() < self.repeat_share:
            # Somebody asks the same again, perhaps another tenant.
            earlier = rng.choice(self.recent)
            text, length, tail = earlier.text, earlier.length, earlier.tail
        else:
            text, length, tail = self._new_prompt()
        params_roll = rng.random()
        fault: FaultKind = ""
        fault_at = 0
        if self.fault_share and rng.random() < self.fault_share:
            fault = rng.choice(_FAULTS)
            fault_at = rng.randint(1, length + len(tail) + 4)
        grammar: int | None = None
        if self.grammar_share and rng.random() < self.grammar_share:
            grammar = rng.choice((0, 2, 2, 3, 5, 5))
            if fault:
                fault = rng.choice((fault, "unmasked"))
        return Add(
            step=step,
            request_id=request_id,
            text=text,
            length=length,
            tail=tail,
            max_tokens=rng.randint(1, self.max_output),
            eos=params_roll < 0.5,
            stops=(5, 3, 17) if params_roll < 0.25 else (),
            priority=rng.randint(0, 2),
            arrival=float(step // 4 - (3600 if rng.random() < 0.01 else 0)),
            salt=rng.randrange(self.num_salts),
            client=rng.randrange(self.num_clients),
            grammar=grammar,
            grammar_seconds=rng.choice((0.0, 0.002, 0.02)) if grammar is not None else 0.0,
            repetition=rng.choice((2, 3)) if rng.random() < self.repetition_share else 0,
            logprobs=rng.random() < self.logprob_share,
            prompt_logprobs=rng.random() < self.logprob_share / 2,
            fault=fault,
            fault_at=fault_at,
        )

    def _new_prompt(self) -> tuple[int, int, tuple[int, ...]]:
        rng = self.rng
        text, length = rng.randrange(self.num_texts), rng.randint(1, self.max_prompt)
        if rng.random() < 0.01:
            # Nobody has checked this one: what fits by a hair, and what does not.
            pool = (self.config.num_blocks - 1) * self.config.block_size
            length = rng.choice((pool - 1, pool, rng.randint(1, 2 * self.config.max_model_len)))
        if rng.random() < 0.5:
            return text, length, ()
        num_own = rng.randint(1, length)
        base = rng.randrange(VOCAB)
        return text, length - num_own, tuple((base + 7 * i) % VOCAB for i in range(num_own))

    @staticmethod
    def _copy(add: Add, *, request_id: str = "", group: int = 0) -> Add:
        return msgspec.structs.replace(
            add, request_id=request_id or add.request_id, group=group or add.group
        )
