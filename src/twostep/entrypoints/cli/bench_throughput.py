"""``twostep bench throughput``: how fast many requests at once are served, offline."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from twostep.contracts.errors import TwostepError, UsageError
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli.bench_engine import (
    BenchEngine,
    Clock,
    deliver,
    find_model,
    make_parser,
    model_named,
    random_ids,
)
from twostep.entrypoints.cli.engine import MakeEngine, load, make_llm
from twostep.entrypoints.load.datasets import custom_prompts, sharegpt_prompts
from twostep.entrypoints.progress import reporter_for

RANDOM_INPUT_LEN = 1024
RANDOM_OUTPUT_LEN = 128
CUSTOM_OUTPUT_LEN = 256

DESCRIPTION = """\
Hand all requests to the engine at once and time until the last one ends.

  twostep bench throughput smollm2-135m --num-prompts 64 --input-len 128 --output-len 128
  twostep bench throughput MODEL --dataset-name sharegpt --dataset-path FILE
"""


class Request(msgspec.Struct, frozen=True):
    """One request: a text, or token ids."""

    prompt: dict[str, Any]
    prompt_len: int
    output_len: int


def run(argv: list[str], make: MakeEngine = make_llm, clock: Clock = time.perf_counter) -> int:
    """Run the bench; returns the exit code. The callables are for tests."""
    parser = make_parser("throughput", DESCRIPTION)
    add = parser.add_argument
    add("--dataset-name", default="random", choices=["random", "sharegpt", "custom"])
    add("--dataset-path", type=Path, metavar="FILE", help="for sharegpt and custom")
    add("--num-prompts", type=cli_args.positive_size, default=1000, metavar="N")
    add(
        "--num-warmups", type=cli_args.size, default=0, metavar="N", help="prompts before the clock"
    )
    add("--input-len", type=cli_args.positive_size, metavar="N", help="of random prompts")
    add("--output-len", type=cli_args.positive_size, metavar="N", help="of every answer")
    add("-n", "--n", type=cli_args.positive_size, default=1, help="answers to each prompt")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--disable-detokenize", action="store_true", help="leave the answers as token ids")
    args = parser.parse(argv)
    check(args)

    model = find_model(args, reporter_for())
    with load(make, model, cli_args.engine_options(args), verbose=False) as engine:
        results, num_output_tokens = measure(cast(BenchEngine, engine), args, clock)
    results = {"model_id": model_named(args), **results}
    deliver(results, lines(results, num_output_tokens), args)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that make no sense together."""
    if args.dataset_name == "random" and args.dataset_path is not None:
        raise UsageError("--dataset-path is for --dataset-name sharegpt or custom")
    if args.dataset_name != "random" and args.dataset_path is None:
        raise UsageError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name != "random" and args.input_len is not None:
        raise UsageError("--input-len is for --dataset-name random: files have their own prompts")


def make_requests(args: argparse.Namespace, tokenizer: Any) -> list[Request]:
    """What the flags describe."""
    count = args.num_prompts
    if args.dataset_name == "random":
        length = args.input_len or RANDOM_INPUT_LEN
        output_len = args.output_len or RANDOM_OUTPUT_LEN
        ids = random_ids(count, length, tokenizer.vocab_size, args.seed)
        return [Request({"prompt_token_ids": each}, length, output_len) for each in ids]
    if args.dataset_name == "sharegpt":
        prompts = sharegpt_prompts(
            tokenizer, args.dataset_path, count, output_len=args.output_len, seed=args.seed
        )
    else:
        prompts = custom_prompts(
            tokenizer, args.dataset_path, count, output_len=args.output_len or CUSTOM_OUTPUT_LEN
        )
    return [Request({"prompt": each.text}, each.num_tokens, each.output_len) for each in prompts]


def measure(
    engine: BenchEngine, args: argparse.Namespace, clock: Clock
) -> tuple[dict[str, Any], int]:
    """(results under vLLM's names, output tokens). Raises TwostepError if an answer is short."""
    requests = make_requests(args, engine.get_tokenizer())
    prompts = [request.prompt for request in requests]
    params = [
        SamplingParams(
            n=args.n,
            temperature=1.0,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=not args.disable_detokenize,
        )
        for request in requests
    ]
    if args.num_warmups:
        warm = [index % len(prompts) for index in range(args.num_warmups)]
        engine.generate([prompts[i] for i in warm], [params[i] for i in warm], use_tqdm=False)
    started = clock()
    outputs = engine.generate(prompts, params, use_tqdm=True)
    elapsed = clock() - started
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = count_output(outputs, requests, args.n)
    return summarise(elapsed, len(requests), num_prompt_tokens + num_output_tokens), (
        num_output_tokens
    )


def count_output(outputs: Sequence[Any], requests: Sequence[Request], n: int) -> int:
    """Tokens of all answers; raises TwostepError for an answer of another length than asked."""
    total = 0
    for output, request in zip(outputs, requests, strict=True):
        lengths = [len(completion.token_ids) for completion in output.outputs]
        if lengths != [request.output_len] * n:
            raise TwostepError(
                f"request {output.request_id}: answers of {lengths} tokens, "
                f"not {n} of {request.output_len}: the figures would be wrong"
            )
        total += sum(lengths)
    return total


def summarise(elapsed: float, num_requests: int, total_num_tokens: int) -> dict[str, Any]:
    """Seconds, and prompt and output tokens together."""
    return {
        "elapsed_time": elapsed,
        "num_requests": num_requests,
        "total_num_tokens": total_num_tokens,
        "requests_per_second": num_requests / elapsed,
        "tokens_per_second": total_num_tokens / elapsed,
    }


def lines(results: dict[str, Any], num_output_tokens: int) -> list[str]:
    """For people, and for scripts that read vLLM's line."""
    output_rate = num_output_tokens / results["elapsed_time"]
    return [
        f"Throughput: {results['requests_per_second']:.2f} requests/s, "
        f"{results['tokens_per_second']:.2f} total tokens/s, {output_rate:.2f} output tokens/s",
        f"Total num prompt tokens:  {results['total_num_tokens'] - num_output_tokens}",
        f"Total num output tokens:  {num_output_tokens}",
    ]
