"""A simulated run as plain data: a configuration and a list of events. It replays exactly."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec

from twostep.contracts.errors import UsageError
from twostep.sim.ghost_model import pick

FaultKind = Literal["", "execute", "sample", "result", "nan", "lost", "unmasked"]
"""How a step shows a failure: launch, sampling or result raise; bad numbers; a missing row; a
token that the grammar does not allow."""


_TEXT_STEP = 256
GlitchKind = Literal[
    "execute", "sample", "result", "interrupt launch", "interrupt sampling", "interrupt wait"
]


class CaseConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine core is built with."""

    is_async: bool = True
    num_blocks: int = 32
    """The null block included."""
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 64
    """Tokens of one step."""
    max_model_len: int = 48
    policy: Literal["fcfs", "priority"] = "fcfs"
    caching: bool = True
    window: int | None = None
    num_spec_tokens: int = 0
    long_prefill_threshold: int = 0
    prefill_burst: int = 0
    crowd_step: int = 0
    chunked_prefill: bool = True
    full_sequence_must_fit: bool = True
    watermark: float = 0.0
    kv_events: bool = False
    max_live: int = 1000
    """Requests that come while this many live are turned away by the simulated front end."""


class Add(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="add",
    omit_defaults=True,
):
    """A request arrives. Its prompt: ``length`` tokens of a common text, then ``tail``."""

    step: int
    request_id: str
    length: int = 0
    tail: tuple[int, ...] = ()
    text: int = 0
    """Which common text; requests of one text share prefixes."""
    max_tokens: int = 1
    eos: bool = False
    stops: tuple[int, ...] = ()
    priority: int = 0
    arrival: float = 0.0
    salt: int = 0
    client: int = 0
    group: int = 0
    """Requests of one group (not 0) are the branches of an n > 1."""
    grammar: int | None = None
    """Modulus of a ghost grammar: 2 or more; one below 2 does not compile."""
    grammar_seconds: float = 0.0
    """Virtual time that compiling takes."""
    repetition: int = 0
    """Ends after so many equal patterns of one or two tokens in a row; 0 = never."""
    logprobs: bool = False
    prompt_logprobs: bool = False
    fault: FaultKind = ""
    """Every step that computes position ``fault_at`` of this request, or a later one, fails."""
    fault_at: int = 0

    def prompt(self) -> list[int]:
        """Token ids."""
        return [*common_text(self.text, self.length), *self.tail]


class Abort(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="abort",
    omit_defaults=True,
):
    """Requests are aborted; ids may be unknown, finished or twice in the list."""

    step: int
    request_ids: tuple[str, ...]
    via_queue: bool = False
    """From another thread: seen when the next result is processed."""


class ResetCache(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag="reset",
    omit_defaults=True,
):
    """The prefix cache is to be forgotten."""

    step: int
    running: bool = False
    """Preempt running requests first."""


class Glitch(msgspec.Struct, frozen=True, kw_only=True, tag="glitch"):
    """The next step of two or more requests fails once, and nobody is to blame.

    An interrupt (Ctrl-C) meets any step: its launch, its sampling, or the wait for its result.
    """

    step: int
    kind: GlitchKind


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """The engine is paused; resumed by ``Resume``, or when the faults stop."""

    step: int
    mode: Literal["abort", "wait", "keep"]


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """The engine goes on; it need not be paused."""

    step: int


class ClockJump(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """Time passes while the engine does nothing."""

    step: int
    seconds: float


Event = Add | Abort | ResetCache | Glitch | Pause | Resume | ClockJump


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run."""

    config: CaseConfig
    events: tuple[Event, ...]
    """In the order of their steps."""
    steps: int
    """Calls of the step function before the faults stop and the engine drains."""
    seed: int | None = None
    """Where it came from."""

    def to_json(self) -> str:
        """For a file that ``twostep simulate check --replay`` reads."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def as_test(self, name: str) -> str:
        """A test function that replays it, ready to paste."""
        events = "".join(f"            {_source(event)},\n" for event in self.events)
        return (
            f"def test_{name}() -> None:\n"
            f"    case = Case(\n"
            f"        config={_source(self.config)},\n"
            f"        events=(\n{events}        ),\n"
            f"        steps={self.steps},\n"
            f"    )\n"
            f"    assert run_case(case).violation is None\n"
        )


def _source(value: CaseConfig | Event) -> str:
    """The call that makes it; fields at their defaults are left out."""
    fields = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in msgspec.structs.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


def read_case(path: Path) -> Case:
    """A case from a file that ``to_json`` made. Raises UsageError if it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Case)
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot replay {path}: {reason}") from error


def common_text(text: int, length: int) -> list[int]:
    """The first tokens of a text that many requests begin with."""
    return _whole_text(text, -(-length // _TEXT_STEP))[:length]


@functools.lru_cache(maxsize=64)
def _whole_text(text: int, size: int) -> list[int]:
    """``size`` times ``_TEXT_STEP`` tokens; the caller copies what it needs."""
    return [
        pick((text + 1) * 0x9E37_79B9_7F4A + i * 0x1234_5678_9ABD) for i in range(size * _TEXT_STEP)
    ]
