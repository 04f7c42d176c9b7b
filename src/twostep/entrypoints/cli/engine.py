"""Loading a model for a command, and the figures a command reports about an answer."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from twostep.contracts.results import RequestOutput
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.cli.console import dim, table
from twostep.entrypoints.garbage import no_garbage
from twostep.entrypoints.resolve import ResolvedModel

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from twostep.entrypoints.tracing.watch import Watch

Message = dict[str, Any]


class Engine(Protocol):
    """What the commands need of ``LLM``."""

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete prompts."""
        ...

    def stream(self, prompt: Any, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
        """Complete one prompt, piece by piece."""
        ...

    def stream_chat(
        self, messages: list[Message], sampling_params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Answer a conversation, piece by piece."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


MakeEngine = Callable[..., Engine]
"""Called as ``make(path, **options)`` with the keyword arguments of ``LLM``."""


def make_llm(model: str, **options: Any) -> Engine:
    """The real engine; imported only now, so that ``--help`` stays quick."""
    with no_garbage():
        from twostep.entrypoints.llm import LLM

        return LLM(model, **options)


@contextlib.contextmanager
def load(
    make: MakeEngine, model: ResolvedModel, options: dict[str, Any], *, verbose: bool
) -> Iterator[Engine]:
    """Load a model; on a terminal shows how far it is, with ``verbose`` then the boot table.

    At the end says where a trace or a recording lies.
    """
    with phases() as progress:
        engine = make(str(model.path), progress=progress, **options)
    if verbose and (report := getattr(engine, "boot", None)) is not None:
        print(dim(table(boot_rows(report)), sys.stderr), file=sys.stderr)
    try:
        with engine:
            yield engine
    finally:
        if (watch := getattr(engine, "watch", None)) is not None:
            tell_watch(watch)


def tell_watch(watch: Watch) -> None:
    """Say on standard error where the files of --trace and --record lie, once they are closed."""
    for line in watch.lines():
        print(dim(line, sys.stderr), file=sys.stderr)


def boot_rows(report: Any) -> Sequence[Sequence[str]]:
    """The boot table's (label, value) rows, from ``report.rows()``."""
    rows: Sequence[Sequence[str]] = report.rows()
    return rows


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, float], None]]:
    """A callback (phase, fraction 0..1) that keeps one line of a terminal up to date.

    Quiet for the first half second: a small model has loaded by then.
    """
    started = time.monotonic()
    shown = False
    is_terminal = sys.stderr.isatty()

    def progress(phase: str, fraction: float) -> None:
        nonlocal shown
        if is_terminal and time.monotonic() - started > 0.5:
            shown = True
            print(f"\r\x1b[K{phase} {fraction:4.0%}", end="", file=sys.stderr, flush=True)

    try:
        yield progress
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Answer(msgspec.Struct):
    """One answer as it grows."""

    started: float
    """Seconds, the caller's clock."""
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, output: RequestOutput, now: float) -> str:
        """Take in a DELTA output that came at ``now``; returns its new text."""
        [piece] = output.outputs
        if piece.token_ids:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        return piece.text

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token; None for fewer than two tokens."""
        if self.first_token is None or self.last_token is None:
            return None
        seconds = self.last_token - self.first_token
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else None

    def usage(self) -> dict[str, int]:
        """Token counts, under the names of the OpenAI API."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": len(self.token_ids),
        }

    def figures(self) -> str:
        """One line for people."""
        parts = [f"{len(self.token_ids)} tokens"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.ttft is not None:
            parts.append(f"first after {1000 * self.ttft:.0f} ms")
        cached = f", {self.num_cached_tokens} cached" if self.num_cached_tokens else ""
        parts.append(f"prompt {self.num_prompt_tokens}{cached}")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)
