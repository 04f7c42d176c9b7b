"""``twostep bench latency``: how long one batch of requests takes from beginning to end."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, cast

from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli.bench_engine import (
    BenchEngine,
    Clock,
    deliver,
    find_model,
    make_parser,
    model_named,
    percentiles,
    random_ids,
)
from twostep.entrypoints.cli.engine import MakeEngine, load, make_llm
from twostep.entrypoints.progress import Reporter, reporter_for

DESCRIPTION = """\
Time a batch of requests of one length, again and again; every answer has exactly --output-len
tokens. The prefix cache is off unless --enable-prefix-caching is given: prompts are the same in
every iteration.

  twostep bench latency smollm2-135m --batch-size 1 --input-len 128 --output-len 128
"""


def run(argv: list[str], make: MakeEngine = make_llm, clock: Clock = time.perf_counter) -> int:
    """Run the bench; returns the exit code. The callables are for tests."""
    parser = make_parser("latency", DESCRIPTION)
    add = parser.add_argument
    add("--input-len", type=cli_args.positive_size, default=32, metavar="N", help="default: 32")
    add("--output-len", type=cli_args.positive_size, default=128, metavar="N", help="default: 128")
    add("--batch-size", type=cli_args.positive_size, default=8, metavar="N", help="default: 8")
    add("-n", "--n", type=cli_args.positive_size, default=1, help="answers to each prompt")
    add("--num-iters", type=cli_args.positive_size, default=30, metavar="N", help="default: 30")
    add("--num-iters-warmup", type=cli_args.size, default=10, metavar="N", help="default: 10")
    add("--disable-detokenize", action="store_true", help="leave the answers as token ids")
    parser.set_defaults(enable_prefix_caching=False)
    args = parser.parse(argv)

    reporter = reporter_for()
    model = find_model(args, reporter)
    with load(make, model, cli_args.engine_options(args), verbose=False) as engine:
        latencies = measure(cast(BenchEngine, engine), args, reporter, clock)
    results = summarise(model_named(args), latencies)
    deliver(results, lines(results, args), args)
    return 0


def measure(
    engine: BenchEngine, args: argparse.Namespace, reporter: Reporter, clock: Clock
) -> list[float]:
    """Seconds of each iteration."""
    ids = random_ids(args.batch_size, args.input_len, engine.get_tokenizer().vocab_size, seed=0)
    prompts = [{"prompt_token_ids": each} for each in ids]
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    latencies = []
    with reporter.count("warm-up", args.num_iters_warmup, "iterations") as advance:
        for number in range(args.num_iters_warmup):
            engine.generate(prompts, params, use_tqdm=False)
            advance(number + 1)
    with reporter.count("latency", args.num_iters, "iterations") as advance:
        for number in range(args.num_iters):
            started = clock()
            engine.generate(prompts, params, use_tqdm=False)
            latencies.append(clock() - started)
            advance(number + 1)
    return latencies


def summarise(model: str, latencies: list[float]) -> dict[str, Any]:
    """The results under vLLM's names; seconds."""
    return {
        "model_id": model,
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
    }


def lines(results: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """For people."""
    tokens = args.batch_size * args.n * args.output_len
    return [
        f"Avg latency: {results['avg_latency']:.4f} seconds "
        f"({tokens / results['avg_latency']:.1f} output tokens/s)",
        *(
            f"{percent}% percentile latency: {value:.4f} seconds"
            for percent, value in results["percentiles"].items()
        ),
    ]
