"""Charts of a comparison, PNG and SVG, from the document that ``results.json`` holds.

python -m benchmarks.plots benchmarks/results/DATE-MACHINE/results.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "twostep": "#d62728",
    "llama.cpp": "#1f77b4",
    "vllm": "#2ca02c",
    "openvino": "#9467bd",
    "transformers": "#7f7f7f",
}
METRIC_TITLES = {
    "tokens_per_second": "tokens/s",
    "total_tokens_per_second": "prompt and output tokens/s",
    "seconds_to_first_token": "seconds from process start to first token",
    "peak_rss_mb": "peak memory, MB",
    "ttft_p99": "99th percentile of time to first token, s",
}
OTHER_METRICS = {"mixed": ["ttft_p99"], "prefix": ["ttft_p99"], "start": ["peak_rss_mb"]}
"""Drawn beside the main one, by kind of cell."""

Engines = dict[str, dict[str, Any]]


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """One chart for each model; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    for model in dict.fromkeys(cell["model"] for cell in document["cells"]):
        panels = panels_of([cell for cell in document["cells"] if cell["model"] == model])
        if not panels:
            continue
        columns = min(3, len(panels))
        lines = -(-len(panels) // columns)
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(5.2 * columns, 3.9 * lines), squeeze=False
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            panel(axis)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        machine = document["machine"]
        figure.suptitle(
            f"{model} on {machine['cpu']}, {machine['threads']} threads, {machine['date']}: "
            "medians, lowest and highest round",
            fontsize=10,
        )
        figure.tight_layout()
        for suffix in ("png", "svg"):
            file = folder / f"{model}.{suffix}"
            figure.savefig(file, dpi=130)
            files.append(file)
        pyplot.close(figure)
    return files


Panel = Callable[[Any], None]


def panels_of(cells: list[dict[str, Any]]) -> list[Panel]:
    """What to draw: prefill by length, decode by batch for each context, bars for the rest."""
    panels: list[Panel] = []

    def add(draw: Callable[..., None], *what: Any) -> None:
        panels.append(lambda axis: draw(axis, *what))

    prefills = [cell for cell in cells if cell["cell"]["kind"] == "prefill" and measured(cell)]
    if prefills:
        add(lines, prefills, "tokens", "prefill", "tokens of the prompt")
    decodes = [cell for cell in cells if cell["cell"]["kind"] == "decode" and measured(cell)]
    for context in dict.fromkeys(cell["cell"]["context"] for cell in decodes):
        some = [cell for cell in decodes if cell["cell"]["context"] == context]
        add(lines, some, "batch", f"decode from {context} tokens of context on", "sequences")
    for cell in cells:
        kind = cell["cell"]["kind"]
        for metric in [cell["metric"], *OTHER_METRICS.get(kind, [])]:
            if kind not in ("prefill", "decode") and measured(cell, metric):
                add(bars, cell, metric)
    return panels


def measured(cell: dict[str, Any], metric: str | None = None) -> Engines:
    """The engines with figures in a cell."""
    metric = metric or cell["metric"]
    return {name: each for name, each in cell["engines"].items() if metric in each["summary"]}


def lines(axis: Any, cells: Sequence[dict[str, Any]], field: str, title: str, label: str) -> None:
    """A line for each engine over a size, with the range of the rounds."""
    names = dict.fromkeys(name for cell in cells for name in measured(cell))
    for name in names:
        points = [
            (cell["cell"][field], measured(cell)[name]["summary"][cell["metric"]])
            for cell in cells
            if name in measured(cell)
        ]
        sizes = [size for size, _ in points]
        middle = [summary["median"] for _, summary in points]
        below = [summary["median"] - summary["low"] for _, summary in points]
        above = [summary["high"] - summary["median"] for _, summary in points]
        axis.errorbar(
            sizes, middle, yerr=[below, above], label=name, marker="o", markersize=3, capsize=2,
            color=colour(name), linestyle=style(name, list(names)),
        )  # fmt: skip
    sizes = sorted({cell["cell"][field] for cell in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(label)
    axis.set_ylabel("tokens/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def bars(axis: Any, cell: dict[str, Any], metric: str) -> None:
    """A bar for each engine."""
    engines = measured(cell, metric)
    names = list(engines)
    summaries = [engines[name]["summary"][metric] for name in names]
    middle = [each["median"] for each in summaries]
    spread = [
        [each["median"] - each["low"] for each in summaries],
        [each["high"] - each["median"] for each in summaries],
    ]
    colours = [colour(name) for name in names]
    axis.barh(names, middle, xerr=spread, color=colours, capsize=2)
    axis.invert_yaxis()
    axis.set_title(f"{cell['cell']['name']}: {METRIC_TITLES.get(metric, metric)}", fontsize=9)
    axis.grid(alpha=0.3, axis="x")


def colour(name: str) -> str:
    """By peer: its settings share one."""
    return next((COLOURS[peer] for peer in COLOURS if name.startswith(peer)), "#000000")


def style(name: str, names: Sequence[str]) -> str:
    """Settings of a peer after its first are dashed."""
    same = [other for other in names if colour(other) == colour(name)]
    return "-" if same[0] == name else "--"


def main() -> int:
    """Draw a results.json again; returns the exit code."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    for file in write(json.loads(path.read_text()), path.parent):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
