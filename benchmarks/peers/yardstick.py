"""The yardstick: one bare C++ program, no scheduler, sampler or text; ``setup_yardstick.sh``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells import BARE_BATCHES, BARE_CONTEXT, Cell, Request
from benchmarks.figures import Answer, Metrics
from benchmarks.models import Model
from benchmarks.peers.base import Engine, Limits
from benchmarks.process import ProgramError, output_of

NAME = "yardstick"
PREFILL = 512


class Yardstick:
    """See ``base.Peer``."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "yardstick"

    def is_installed(self) -> bool:
        """Whether its set-up script has run."""
        return (self._folder / "yardstick").exists()

    def version(self) -> str:
        """It has none."""
        return "built here"

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Its better way to share work among threads. Knows one architecture's shape only."""
        if model.gguf is None or not model.name.startswith("smol-"):
            return []
        return [YardstickEngine(self._folder, model.gguf, limits)]


class YardstickEngine:
    """See ``base.Engine``. Each turn loads the model anew, unseen by its clock."""

    peer = NAME
    name = NAME

    def __init__(self, folder: Path, model: Path, limits: Limits) -> None:
        self._folder = folder
        self._model = model
        self._environment = {"NT": str(limits.threads), "STEAL": "1"}

    def cannot(self, cell: Cell) -> str | None:
        """Runs the cells that its ``bench`` prints."""
        is_prefill = cell.kind == "prefill" and cell.tokens == PREFILL
        is_decode = (
            cell.kind == "decode" and cell.context == BARE_CONTEXT and cell.batch in BARE_BATCHES
        )
        return None if is_prefill or is_decode else "not one of its cells"

    def measure(self, cell: Cell, requests: Sequence[Request]) -> tuple[Metrics, list[Answer]]:
        """One round of all its cells; the one that is asked for counts."""
        del requests
        out = self._run("bench", environment={"REPS": "1"})
        return {"tokens_per_second": parse_bench(out, cell)}, []

    def start(self) -> Metrics:
        """It has no start worth comparing: it only runs with its weights dumped."""
        raise ProgramError("not one of its cells")

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``Engine.greedy``."""
        with tempfile.TemporaryDirectory() as folder:
            ids = Path(folder) / "ids"
            ids.write_text("".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts))
            out = self._run("gen", str(ids), str(max_tokens), str(Path(folder) / "logits"))
        return [[int(word) for word in line.split()] for line in out.splitlines()]

    def rest(self) -> None:
        """Nothing of it runs between turns."""

    def close(self) -> None:
        """Nothing of it runs between turns."""

    def _run(self, mode: str, *words: str, environment: dict[str, str] | None = None) -> str:
        weights = self._folder / self._model.stem
        if not weights.with_suffix(".bin").exists():
            python = str(self._folder / "bin" / "python")
            output_of([python, str(self._folder / "dump.py"), str(self._model), str(weights)])
        command = [str(self._folder / "yardstick"), str(weights), mode, *words]
        return output_of(command, {**self._environment, **(environment or {})})


def parse_bench(out: str, cell: Cell) -> float:
    """Tokens per second of a cell, from lines like ``B=8 ctx128-256: best 1515 med 1490 t/s``."""
    label = f"pp{cell.tokens}" if cell.kind == "prefill" else f"B={cell.batch} ctx"
    for line in out.splitlines():
        found = re.search(r"med (\d+) t/s", line)
        if line.startswith(label) and found:
            return float(found.group(1))
    raise ProgramError(f"the yardstick printed no line for {cell.name}")
