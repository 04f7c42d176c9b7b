"""twostep beside llama.cpp, in one run: the two take turns, medians and ratios are reported.

    python benchmarks/compare.py MODEL.gguf --llama-bin DIR [--rounds 5] [--json FILE]

DIR is what ``benchmarks/peers/setup_llama_cpp.sh`` prints. Ours goes through ``LLM`` with
sampling, prefix caching and asynchronous scheduling on. llama.cpp runs with flash attention off and
on, and the better of the two medians counts. Cells: prefill of 512 tokens; decode of B sequences
from 128 tokens of context on, counting only steps in which all B decode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from twostep import LLM, SamplingParams

PREFILL = 512
CONTEXT = 128
NEW_TOKENS = 64


def main() -> int:
    """Run the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()

    figures: dict[str, dict[str, list[float]]] = {}

    def note(cell: str, who: str, value: float) -> None:
        figures.setdefault(cell, {}).setdefault(who, []).append(value)

    with LLM(
        args.model, threads=args.threads, max_num_seqs=max(args.batch), max_model_len=1024
    ) as llm:
        ours_prefill(llm, seed=-1)  # warm up
        for batch in args.batch:
            ours_decode(llm, batch, seed=-1)
        for round_number in range(args.rounds):
            print(f"round {round_number + 1} of {args.rounds}", file=sys.stderr)
            note("prefill 512", "twostep", ours_prefill(llm, seed=round_number))
            for flash in ("off", "on"):
                note("prefill 512", f"llama.cpp fa {flash}", llama_prefill(args, flash))
            for batch in args.batch:
                note(f"decode B={batch}", "twostep", ours_decode(llm, batch, seed=round_number))
            for flash in ("off", "on"):
                for batch, speed in llama_decode(args, flash).items():
                    note(f"decode B={batch}", f"llama.cpp fa {flash}", speed)
    report(figures)
    if args.json:
        machine = {
            "processor": processor(),
            "threads": args.threads,
            "python": platform.python_version(),
        }
        args.json.write_text(
            json.dumps(
                {
                    "date": time.strftime("%Y-%m-%d"),
                    "machine": machine,
                    "model": args.model.name,
                    "tokens_per_second": figures,
                },
                indent=1,
            )
        )
    return 0


def ours_prefill(llm: LLM, seed: int) -> float:
    """Prompt tokens per second of one request, its first token included."""
    ids = random.Random(f"{seed}").choices(range(100, 40000), k=PREFILL)
    started = time.perf_counter()
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, seed=1), use_tqdm=False)
    return PREFILL / (time.perf_counter() - started)


def ours_decode(llm: LLM, batch: int, seed: int) -> float:
    """Tokens per second while all ``batch`` sequences decode."""
    generator = random.Random(f"{seed}")
    params = SamplingParams(
        temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=NEW_TOKENS, seed=1
    )
    for _ in range(batch):
        llm.add_request(
            {"prompt_token_ids": generator.choices(range(100, 40000), k=CONTEXT)}, params
        )
    seconds, tokens, last = 0.0, 0, time.perf_counter()
    decoding: set[str] = set()  # requests whose first token, the prefill's, has come
    while llm.has_unfinished_requests():
        outputs = llm.step()
        now = time.perf_counter()
        if len(outputs) == batch == len(decoding):
            seconds, tokens = seconds + now - last, tokens + batch
        decoding.update(output.request_id for output in outputs)
        last = now
    return tokens / seconds


def llama(args: argparse.Namespace, tool: str, *options: str) -> str:
    """Standard output of one of llama.cpp's tools."""
    command = [str(args.llama_bin / tool), "-m", str(args.model), "-t", str(args.threads), *options]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(args.llama_bin)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tool} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def llama_prefill(args: argparse.Namespace, flash: str) -> float:
    """Prompt tokens per second."""
    flag = "1" if flash == "on" else "0"
    out = llama(
        args, "llama-bench", "-p", str(PREFILL), "-n", "0", "-fa", flag, "-r", "2", "-o", "json"
    )
    return float(json.loads(out)[0]["avg_ts"])


def llama_decode(args: argparse.Namespace, flash: str) -> dict[int, float]:
    """Tokens per second by batch size."""
    sizes = ",".join(map(str, args.batch))
    out = llama(
        args, "llama-batched-bench", "-c", str(2 * max(args.batch) * (CONTEXT + NEW_TOKENS)),
        "-npp", str(CONTEXT), "-ntg", str(NEW_TOKENS), "-npl", sizes, "-fa", flash,
    )  # fmt: skip
    rows = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("|")]
    numbers = [row for row in rows if row[0].strip().isdigit()]
    return {int(row[2]): float(row[7]) for row in numbers}


def report(figures: dict[str, dict[str, list[float]]]) -> None:
    """Print the table."""
    print(f"{processor()}: tokens/s, median (min - max)")
    for cell, by_engine in figures.items():
        ours = statistics.median(by_engine["twostep"])
        peers = {who: statistics.median(v) for who, v in by_engine.items() if who != "twostep"}
        best = max(peers, key=peers.__getitem__)
        print(
            f"{cell:14} twostep {spread(by_engine['twostep'])}   {best} {spread(by_engine[best])}"
            f"   ratio {ours / peers[best]:.2f}"
        )


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):7.1f} ({min(values):.0f} - {max(values):.0f})"


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
