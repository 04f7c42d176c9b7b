"""What the comparison asks of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from benchmarks.cells import Cell, Request
from benchmarks.figures import Answer, Metrics
from benchmarks.models import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What every engine is started with, for all cells of a model."""

    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int
    """Tokens whose keys and values must fit."""


class Engine(Protocol):
    """One engine at one setting with one model. Loads when first asked for something."""

    peer: str
    """Whose: ``llama.cpp``."""
    name: str
    """Peer and setting: ``llama.cpp fa=on``."""

    def cannot(self, cell: Cell) -> str | None:
        """Why it cannot run a cell; None if it can."""
        ...

    def measure(self, cell: Cell, requests: Sequence[Request]) -> tuple[Metrics, list[Answer]]:
        """Run the cell once. Answers are empty where the engine does not tell what it said.

        Raises:
            ProgramError, ValueError: It failed, or did not do what was asked.
        """
        ...

    def start(self) -> Metrics:
        """From nothing to the first token, in a process of its own."""
        ...

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The likeliest tokens, one by one."""
        ...

    def rest(self) -> None:
        """Cost nothing until asked again."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class Peer(Protocol):
    """An engine's program, as installed here."""

    name: str

    def is_installed(self) -> bool:
        """Whether its set-up script has run."""
        ...

    def version(self) -> str:
        """For the record."""
        ...

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Its settings for a model; empty if it cannot read the model's files."""
        ...


GREEDY_TOKENS = 8
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
"""Of every timed request."""
