"""twostep beside its peers, in one run: engines take turns, medians and ratios are reported.

    python -m benchmarks.compare --peers-dir DIR --models-dir DIR [--quick] [--rounds 5]
        [--peers llama.cpp vllm …] [--models smol-Q4_0 …] [--cells "prefill 512" "decode B=16" …]

``--peers-dir`` is where the scripts of ``benchmarks/peers/`` installed (llama, vllm, openvino below
it), ``--models-dir`` where ``benchmarks.make_models`` writes. What is not there is left out.
See docs/benchmarks.md for what a cell means. Results go to benchmarks/results/DATE-MACHINE/ (or
``--out``): results.json, table.md and charts. Exit code 1 if an engine's output was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import checks, machine
from benchmarks.cells import Cell, all_cells, choose_cells, requests_of
from benchmarks.models import Model, all_models, is_present
from benchmarks.peers.base import Engine, Limits, Peer
from benchmarks.peers.hf_transformers import HfTransformers
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino_llm import OpenVino
from benchmarks.peers.ours import NAME as OURS
from benchmarks.peers.ours import OurEngine, Ours
from benchmarks.peers.vllm_cpu import VllmCpu
from benchmarks.peers.yardstick import Yardstick
from benchmarks.process import ROOT, ProgramError
from benchmarks.results import CellResult, EngineResult, Record

STAY_LOADED_BYTES = 2 << 30
"""Engines of larger files are closed after each turn: all at once would not fit in memory."""
KV_BYTES_LIMIT = 4 << 30
"""Cells that need more keys and values are left out."""


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    args = parse(argv)
    peers = choose_peers(args)
    models = choose_models(args)
    facts = machine.describe(args.threads)
    record = Record(
        machine=facts,
        versions={peer.name: peer.version() for peer in peers},
        command=sys.argv[1:] if argv is None else argv,
        rounds=args.rounds,
    )
    folder = args.out
    if folder is None:
        date = time.strftime("%Y-%m-%d")
        folder = ROOT / "benchmarks" / "results" / f"{date}-{machine.slug(facts)}"
    for model in models:
        cells = choose_cells(all_cells(model, quick=args.quick), args.cells)
        compare_model(model, cells, peers, args, record, folder)
    print("\n".join(record.table()))
    if not args.no_plots:
        from benchmarks import plots  # matplotlib is slow to import and in an extra

        plots.write(record.document(), folder)
    say(f"results are in {folder}")
    is_wrong = any(
        problem.startswith("wrong output")
        for cell in record.cells
        for engine in cell.engines.values()
        for problem in engine.problems
    )
    return 1 if is_wrong else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--peers-dir", type=Path, required=True)
    add("--models-dir", type=Path, required=True)
    add("--peers", nargs="+", metavar="PEER", help="default: all that are installed")
    add("--models", nargs="+", metavar="MODEL", help="default: all that are on disk")
    add("--cells", nargs="+", metavar="CELL", help="names or their first words; default: all")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--quick", action="store_true", help="one short cell of each kind")
    add("--out", type=Path, help="folder of the results")
    add("--no-plots", action="store_true")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def choose_peers(args: argparse.Namespace) -> list[Peer]:
    """Ours first. Raises SystemExit for a peer that is unknown or, if asked for, not installed."""
    folder = args.peers_dir.resolve()
    known: list[Peer] = [
        LlamaCpp(folder),
        VllmCpu(folder),
        OpenVino(folder),
        HfTransformers(folder),
        Yardstick(folder),
    ]
    names = [peer.name for peer in known]
    for wanted in args.peers or []:
        if wanted not in names:
            raise SystemExit(f"no peer is named {wanted!r}: there are {', '.join(names)}")
    found: list[Peer] = [Ours()]
    for peer in known:
        if args.peers is not None and peer.name not in args.peers:
            continue
        if peer.is_installed():
            found.append(peer)
        elif args.peers is not None:
            raise SystemExit(f"{peer.name} is not in {folder}: run its script in benchmarks/peers/")
        else:
            say(f"{peer.name} is not in {folder}: left out")
    return found


def choose_models(args: argparse.Namespace) -> list[Model]:
    """Raises SystemExit for a model that is unknown or, if asked for, not on disk."""
    models = all_models(args.models_dir.resolve())
    for name in args.models or []:
        if name not in models:
            raise SystemExit(f"no model is named {name!r}: there are {', '.join(models)}")
        if not is_present(models[name]):
            raise SystemExit(
                f"{name} is not in {args.models_dir}: make it (benchmarks.make_models)"
            )
    found = [models[name] for name in args.models or models if is_present(models[name])]
    if not found:
        raise SystemExit(f"no model is in {args.models_dir}: make some (benchmarks.make_models)")
    return found


def compare_model(
    model: Model,
    cells: list[Cell],
    peers: list[Peer],
    args: argparse.Namespace,
    record: Record,
    folder: Path,
) -> None:
    """All cells of one model."""
    limit = KV_BYTES_LIMIT // model.shape.kv_bytes_per_token
    for cell in cells:
        if cell.kv_tokens > limit or cell.longest > model.max_position:
            say(f"{model.name}: {cell.name} left out: its keys and values do not fit")
    cells = [c for c in cells if c.kv_tokens <= limit and c.longest <= model.max_position]
    limits = limits_for(cells, args.threads)
    engines = [engine for peer in peers for engine in peer.engines(with_files(model), limits)]
    stay_loaded = model.file_bytes <= STAY_LOADED_BYTES
    settler = machine.Settler(args.threads)
    try:
        wrong = check_all(model, engines, limits, record, stay_loaded=stay_loaded)
        for cell in cells:
            result = CellResult(model=model.name, cell=cell)
            record.cells.append(result)
            for engine in engines:
                result.engines[engine.name] = EngineResult(engine.peer)
                reason = wrong.get(engine.name) or engine.cannot(cell)
                if reason is not None:
                    result.engines[engine.name].problems.append(reason)
            able = [e for e in engines if not result.engines[e.name].problems]
            for number in range(args.rounds):
                say(f"{model.name}: {cell.name}: round {number + 1} of {args.rounds}")
                one_round(cell, number, able, result, args, settler, stay_loaded=stay_loaded)
                record.write(folder)
    finally:
        for engine in engines:
            engine.close()


def limits_for(cells: list[Cell], threads: int) -> Limits:
    """What holds every cell."""
    return Limits(
        threads=threads,
        max_num_seqs=max([cell.batch for cell in cells] + [8]),
        max_model_len=max([cell.longest for cell in cells] + [256]),
        kv_tokens=max([cell.kv_tokens for cell in cells] + [2048]),
    )


def with_files(model: Model) -> Model:
    """The model without a Hugging Face folder that is not on disk."""
    import dataclasses

    has_hf = model.hf is not None and (model.hf / "config.json").exists()
    return model if has_hf else dataclasses.replace(model, hf=None)


def check_all(
    model: Model, engines: list[Engine], limits: Limits, record: Record, *, stay_loaded: bool
) -> dict[str, str]:
    """{engine: what is wrong with its output}; every engine's answers go into the record."""
    say(f"{model.name}: what do the engines say?")
    prompts = checks.prompts_of(model)
    expected = checks.reference(model, limits, prompts)
    found = {}
    for engine in engines:
        with turn(engine, stay_loaded=stay_loaded):
            found[engine.name] = checks.check_engine(engine, prompts, expected)
        if found[engine.name]["problem"] is not None:
            say(f"{model.name}: {engine.name}: {found[engine.name]['problem']}")
    record.checks[model.name] = {"likeliest": expected, **found}
    return {name: one["problem"] for name, one in found.items() if one["problem"] is not None}


def one_round(
    cell: Cell,
    number: int,
    engines: list[Engine],
    result: CellResult,
    args: argparse.Namespace,
    settler: machine.Settler,
    *,
    stay_loaded: bool,
) -> None:
    """Every engine once; who begins changes from round to round."""
    shift = number % max(1, len(engines))
    for engine in engines[shift:] + engines[:shift]:
        mine = result.engines[engine.name]
        if mine.problems:
            continue
        with turn(engine, stay_loaded=stay_loaded or cell.kind == "start"):
            try:
                if number == 0 and cell.kind in ("prefill", "decode") and not args.quick:
                    engine.measure(cell, requests_of(cell, -1))  # warm up
                settler.settle()
                mine.rounds[number] = measure(cell, number, engine, mine, last=args.rounds - 1)
            except (ProgramError, ValueError) as error:
                mine.problems.append(str(error))
                say(f"{engine.name}: {error}")


def measure(
    cell: Cell, number: int, engine: Engine, mine: EngineResult, *, last: int
) -> dict[str, float]:
    """One engine's turn; in the last round ours must say the same alone."""
    if cell.kind == "start":
        return engine.start()
    requests = requests_of(cell, number)
    metrics, answers = engine.measure(cell, requests)
    if isinstance(engine, OurEngine) and cell.kind != "http" and number == last:
        problem = checks.check_alone(engine, cell, requests, answers)
        if problem is not None:
            mine.problems.append(problem)
            say(f"{OURS}: {problem}")
    return metrics


@contextlib.contextmanager
def turn(engine: Engine, *, stay_loaded: bool) -> Iterator[None]:
    """While an engine has the machine: afterwards it is paused, or closed to make room."""
    try:
        yield
    finally:
        if stay_loaded:
            engine.rest()
        else:
            engine.close()


def say(text: str) -> None:
    """How far the run is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
