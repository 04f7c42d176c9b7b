"""From a failing case to a small one: drop events, then simplify what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from twostep.contracts.errors import UsageError
from twostep.sim.case import Abort, Add, Case, CaseConfig, Event
from twostep.sim.simulation import run_case

MAX_RUNS = 2000
"""Runs of smaller and smaller cases; enough to get from thousands of events to a handful."""


def shrink(case: Case, *, max_runs: int = MAX_RUNS) -> Case:
    """The smallest case found that breaks the same rule. ``case`` must break one."""
    return _Shrinker(case, max_runs).run()


class _Shrinker:
    def __init__(self, case: Case, max_runs: int) -> None:
        outcome = run_case(case)
        assert outcome.violation is not None, "nothing to shrink: the case passes"
        self.check = outcome.violation.check
        self.runs_left = max_runs
        self.case = case
        if outcome.violation.step < case.steps:
            self._try(msgspec.structs.replace(case, steps=outcome.violation.step + 1))

    def run(self) -> Case:
        """Pass after pass, until none helps."""
        passes = (
            self._drop_events,
            self._simplify_config,
            self._simplify_events,
            self._fewer_steps,
        )
        while self.runs_left > 0:
            before = self.case
            for shrink_once in passes:
                shrink_once()
            if self.case == before:
                break
        return self.case

    def _try(self, candidate: Case) -> bool:
        """Keep the candidate if it breaks the same rule."""
        if self.runs_left <= 0:
            return False
        self.runs_left -= 1
        try:
            violation = run_case(candidate).violation
        except UsageError:
            return False  # a configuration that no engine can be built with
        if violation is None or violation.check != self.check:
            return False
        # An event breaks a rule before its step is counted.
        steps = min(candidate.steps, violation.step + 1)
        self.case = msgspec.structs.replace(candidate, steps=steps)
        return True

    def _with_events(self, events: list[Event]) -> Case:
        return msgspec.structs.replace(self.case, events=tuple(events))

    def _drop_events(self) -> None:
        """Halves, quarters, ... single events."""
        size = max(1, len(self.case.events) // 2)
        while size:
            start = 0
            while start < len(self.case.events):
                events = list(self.case.events)
                del events[start : start + size]
                if not self._try(self._with_events(events)):
                    start += size
            size //= 2

    def _simplify_events(self) -> None:
        for index in range(len(self.case.events)):
            for simpler in _simpler_events:
                self._simplify_one(index, simpler)

    def _simplify_one(self, index: int, simpler: Callable[[Event], Iterator[Event]]) -> None:
        helps = True
        while helps:
            helps = False
            for event in simpler(self.case.events[index]):
                events = list(self.case.events)
                events[index] = event
                if event != self.case.events[index] and self._try(self._with_events(events)):
                    helps = True
                    break

    def _simplify_config(self) -> None:
        for name in CaseConfig.__struct_fields__:
            for value in _simpler_values(name, getattr(self.case.config, name)):
                config = msgspec.structs.replace(self.case.config, **{name: value})
                if self._try(msgspec.structs.replace(self.case, config=config)):
                    break

    def _fewer_steps(self) -> None:
        """Events move up as far as the rule stays broken."""
        gaps = sorted({event.step for event in self.case.events} | {0})
        for low, high in zip(gaps, gaps[1:], strict=False):
            for by in (high - low - 1, (high - low) // 2, 1):
                if by > 0:
                    events = [
                        msgspec.structs.replace(event, step=event.step - by)
                        if event.step >= high
                        else event
                        for event in self.case.events
                    ]
                    steps = max(1, self.case.steps - by)
                    if self._try(msgspec.structs.replace(self._with_events(events), steps=steps)):
                        break


def _plain_fields(event: Event) -> Iterator[Event]:
    """Each field back to its default."""
    if not isinstance(event, Add):
        return
    for name, default in zip(
        Add.__struct_fields__[-len(Add.__struct_defaults__) :], Add.__struct_defaults__, strict=True
    ):
        if name not in ("length", "tail", "max_tokens", "fault_at") and (
            getattr(event, name) != default
        ):
            yield msgspec.structs.replace(event, **{name: default})


def _fewer_tokens(event: Event) -> Iterator[Event]:
    if not isinstance(event, Add):
        return
    replace = msgspec.structs.replace
    if event.tail:
        yield replace(event, length=event.length + len(event.tail), tail=())
    if event.stops:
        yield replace(event, stops=event.stops[1:])
    for fewer in (len(event.tail) // 2, len(event.tail) - 1):
        if 0 <= fewer < len(event.tail):
            yield replace(event, tail=event.tail[:fewer])
    for name in ("length", "max_tokens"):
        value = getattr(event, name)
        for fewer in (value // 2, value - 1):
            if (0 if name == "length" else 1) <= fewer < value:
                yield replace(event, **{name: fewer})


def _fewer_ids(event: Event) -> Iterator[Event]:
    if isinstance(event, Abort) and len(event.request_ids) > 1:
        for index in range(len(event.request_ids)):
            ids = event.request_ids[:index] + event.request_ids[index + 1 :]
            yield msgspec.structs.replace(event, request_ids=ids)


_simpler_events = (_plain_fields, _fewer_tokens, _fewer_ids)


def _simpler_values(name: str, value: object) -> list[object]:
    simple: dict[str, list[object]] = {
        "is_async": [False],
        "policy": ["fcfs"],
        "caching": [False],
        "window": [None],
        "num_spec_tokens": [0, 1],
        "long_prefill_threshold": [0],
        "prefill_burst": [0],
        "crowd_step": [0],
        "chunked_prefill": [True],
        "full_sequence_must_fit": [True],
        "block_size": [1, 2, 4],
        "budget": [4, 8, 16, 64],
        "max_num_seqs": [1, 2, 3, 4],
        "num_blocks": [4, 5, 6, 8, 12, 16, 32],
        "max_model_len": [8, 16, 32],
        "max_live": [1000],
        "watermark": [0.0],
        "kv_events": [False],
    }
    values = simple[name]
    if value in values:
        return values[: values.index(value)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [v for v in values if isinstance(v, int) and (v < value or name == "max_live")]
    return values
