"""The record of a comparison: what came of each round, written to disk after every one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell
from benchmarks.figures import LOWER_IS_BETTER, MAIN_METRIC, Metrics
from benchmarks.stats import Ratio, Summary, ratio

OURS = "twostep"


@dataclasses.dataclass
class EngineResult:
    """One engine in one cell."""

    peer: str
    rounds: dict[int, Metrics] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    """Why there are no figures, or why they do not count."""

    def metric(self, name: str) -> dict[int, float]:
        """{round: value}; empty if something is wrong with its answers."""
        if self.problems:
            return {}
        return {number: each[name] for number, each in self.rounds.items() if name in each}


@dataclasses.dataclass
class CellResult:
    """All engines in one cell of one model."""

    model: str
    cell: Cell
    engines: dict[str, EngineResult] = dataclasses.field(default_factory=dict)

    @property
    def main_metric(self) -> str:
        """What ratios are taken of."""
        return MAIN_METRIC[self.cell.kind]

    def metrics(self) -> list[str]:
        """Names of all metrics, the main one first."""
        names = [name for each in self.engines.values() for m in each.rounds.values() for name in m]
        return list(dict.fromkeys([self.main_metric, *names]))

    def ratios(self, metric: str) -> dict[str, Ratio]:
        """{peer: ours against its better setting}."""
        ours = self.engines[OURS].metric(metric) if OURS in self.engines else {}
        found = {}
        for peer in dict.fromkeys(each.peer for each in self.engines.values()):
            if peer == OURS:
                continue
            variants = {
                name: each.metric(metric)
                for name, each in self.engines.items()
                if each.peer == peer
            }
            one = ratio(ours, variants, lower_is_better=metric in LOWER_IS_BETTER)
            if one is not None:
                found[peer] = one
        return found

    def document(self) -> dict[str, Any]:
        """For JSON."""
        main = self.main_metric
        return {
            "model": self.model,
            "cell": dataclasses.asdict(self.cell),
            "metric": main,
            "lower_is_better": main in LOWER_IS_BETTER,
            "engines": {name: engine_document(each) for name, each in self.engines.items()},
            "ratios": {
                metric: {
                    peer: {
                        "variant": one.variant,
                        "median": one.median,
                        "per_round": one.per_round,
                    }
                    for peer, one in self.ratios(metric).items()
                }
                for metric in self.metrics()
            },
        }


def engine_document(engine: EngineResult) -> dict[str, Any]:
    """For JSON: every round, and medians with spread."""
    names = dict.fromkeys(name for each in engine.rounds.values() for name in each)
    return {
        "peer": engine.peer,
        "problems": engine.problems,
        "rounds": [{"round": number, **each} for number, each in sorted(engine.rounds.items())],
        "summary": {
            name: dataclasses.asdict(Summary.of(list(engine.metric(name).values())))
            for name in names
            if engine.metric(name)
        },
    }


@dataclasses.dataclass
class Record:
    """Everything of a run."""

    machine: dict[str, Any]
    versions: dict[str, str]
    command: list[str]
    rounds: int
    checks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """{model: {engine: what came of the check of its first tokens}}."""
    cells: list[CellResult] = dataclasses.field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.machine,
            "versions": self.versions,
            "command": self.command,
            "rounds": self.rounds,
            "checks": self.checks,
            "cells": [each.document() for each in self.cells],
        }

    def write(self, folder: Path) -> None:
        """``results.json`` and ``table.md``; each replaced at once: a reader sees whole files."""
        folder.mkdir(parents=True, exist_ok=True)
        put(folder / "results.json", json.dumps(self.document(), indent=1) + "\n")
        put(folder / "table.md", "\n".join(self.table()) + "\n")

    def table(self) -> list[str]:
        """The table, Markdown: medians (low - high), and the rounds' median ratio."""
        lines = [
            f"{self.machine['cpu']}, {self.machine['threads']} threads, kernels "
            f"{self.machine['kernels']}, {self.machine['date']}, commit {self.machine['commit']}, "
            f"{self.rounds} rounds",
            "",
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]
        for model in dict.fromkeys(each.model for each in self.cells):
            lines += ["", f"## {model}", ""]
            lines += ["| cell | metric | engine | median (low - high) | twostep is better by |"]
            lines += ["|---|---|---|---|---|"]
            for cell in self.cells:
                if cell.model == model:
                    lines += rows(cell)
        return lines


def rows(cell: CellResult) -> list[str]:
    """Lines of one cell."""
    lines = []
    for metric in cell.metrics():
        ratios = cell.ratios(metric)
        for name, engine in cell.engines.items():
            values = list(engine.metric(metric).values())
            if not values:
                continue
            one = ratios.get(engine.peer)
            better = f"{one.median:.2f} x" if one is not None and one.variant == name else ""
            summary = Summary.of(values)
            lines.append(
                f"| {cell.cell.name} | {metric} | {name} | {number(summary.median)} "
                f"({number(summary.low)} - {number(summary.high)}) | {better} |"
            )
    lines += [
        f"| {cell.cell.name} | | {name} | {'; '.join(engine.problems)} | |"
        for name, engine in cell.engines.items()
        if engine.problems
    ]
    return lines


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def put(path: Path, text: str) -> None:
    """Replace a file at once."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)
