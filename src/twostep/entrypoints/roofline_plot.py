"""A roofline as a picture: operations per second over operations per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostep.contracts.errors import TwostepError, UsageError

SUFFIXES = (".svg", ".png")
LOWEST, HIGHEST = 0.25, 4096.0
"""Operations per byte, from left to right."""


def check_plot(path: str) -> Path:
    """The file to draw to. Raises UsageError for another kind of file, or without matplotlib."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: name a file that ends with {' or '.join(SUFFIXES)}")
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: run `pip install 'twostep[bench]'`") from None
    del matplotlib
    return file


def draw(file: Path, cpu: str, roofline: dict[str, Any], model: dict[str, Any] | None) -> None:
    """Draw what ``doctor`` found: the roofs, and where the model's cells lie under them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(roofline["bandwidth_gb_s"], key=int)
    bandwidth = roofline["bandwidth_gb_s"][threads]
    figure, axis = pyplot.subplots(figsize=(8, 5.5))
    for kind, by_threads in roofline["gop_s"].items():
        peak = by_threads[threads]
        ridge = peak / bandwidth
        # The slope is common to all kinds: each one's flat part begins where it leaves it.
        heights = [LOWEST * bandwidth, peak, peak]
        axis.plot([LOWEST, ridge, HIGHEST], heights, label=f"{kind} {peak:.0f} GOP/s")
    for cell in [] if model is None else model["cells"]:
        axis.plot(cell["intensity"], cell["gop_s"], "o", color="black")
        axis.annotate(
            f"{cell['name']}: {cell['share']:.0%}",
            (cell["intensity"], cell["gop_s"]),
            textcoords="offset points",
            xytext=(6, -12),
            fontsize=8,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte read")
    axis.set_ylabel("GOP/s")
    title = f"{cpu}, {threads} threads, {bandwidth:.1f} GB/s"
    axis.set_title(title if model is None else f"{model['model']} on {title}", fontsize=10)
    axis.grid(which="both", alpha=0.25)
    axis.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(file)
    except OSError as error:
        raise TwostepError(f"cannot write --plot {file}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
