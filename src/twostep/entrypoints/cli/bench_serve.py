"""``twostep bench serve``: load on a server that speaks OpenAI, timed from outside."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli.args import Parser, positive_size, size
from twostep.entrypoints.progress import Silent, reporter_for

if TYPE_CHECKING:
    from twostep.entrypoints.load.arrivals import Rate
    from twostep.entrypoints.load.client import Target
    from twostep.entrypoints.load.datasets import Prompt
    from twostep.frontend.tokenizer import Tokenizer

METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
SAMPLING = (
    ("temperature", float),
    ("top_p", float),
    ("top_k", int),
    ("min_p", float),
    ("presence_penalty", float),
    ("frequency_penalty", float),
    ("repetition_penalty", float),
)


def run(argv: list[str]) -> int:
    """Run the load; 1 if no request succeeded."""
    args = make_parser().parse(argv)
    check(args)
    import uvloop  # asyncio's own loop takes 1.6 times as much from the cores that serve

    result = uvloop.run(measure(args))
    print_result(args, result)
    return 0 if result["completed"] else 1


def make_parser() -> Parser:
    """vLLM's names for flags, where it has one."""
    parser = Parser(
        "twostep bench serve",
        "",
        "Load on a running server (twostep, vLLM, llama.cpp, any that speaks OpenAI).\n\n"
        "  twostep bench serve --port 8000 --num-prompts 100 --max-concurrency 16\n"
        "  twostep bench serve --request-rate 4 --goodput ttft:500 tpot:60 --save-result",
    )
    add_server_flags(parser)
    add_dataset_flags(parser)
    add_traffic_flags(parser)
    add_result_flags(parser)
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", default="openai", choices=["openai", "openai-chat"], help="which endpoint")
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", metavar="PATH", help="default: by backend")
    add("--header", action="append", default=[], metavar="KEY=VALUE", help="repeatable")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--model", metavar="NAME", help="default: the first model that the server lists")
    add("--served-model-name", metavar="NAME", help="if requests must call it differently")
    add("--tokenizer", metavar="MODEL", help="counts prompt tokens (default: --model, on disk)")
    add("--ready-check-timeout-sec", type=float, default=600.0, metavar="S", help="default: 600")


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    names = ["random", "sharegpt", "custom", "prefix_repetition"]
    add("--dataset-name", default="random", choices=names)
    add("--dataset-path", type=Path, metavar="FILE", help="for sharegpt and custom")
    add("--num-prompts", type=positive_size, default=1000, metavar="N", help="default: 1000")
    add("--seed", type=int, default=0)
    add("--input-len", type=positive_size, metavar="N", help="the same as --random-input-len")
    add("--output-len", type=positive_size, metavar="N", help="of every dataset")
    add("--random-input-len", type=positive_size, default=1024, metavar="N")
    add("--random-output-len", type=positive_size, default=128, metavar="N")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths +- this share")
    add("--random-prefix-len", type=size, default=0, metavar="N", help="shared by all prompts")
    add("--sharegpt-output-len", type=positive_size, metavar="N")
    add("--custom-output-len", type=positive_size, default=256, metavar="N")
    add("--prefix-repetition-prefix-len", type=positive_size, default=256, metavar="N")
    add("--prefix-repetition-suffix-len", type=positive_size, default=256, metavar="N")
    add("--prefix-repetition-num-prefixes", type=positive_size, default=10, metavar="N")
    add("--prefix-repetition-output-len", type=positive_size, default=128, metavar="N")


def add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="per second (inf)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; below: bursts")
    add("--max-concurrency", type=positive_size, metavar="N", help="most requests under way")
    add("--ramp-up-strategy", choices=["linear", "exponential"])
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--num-warmups", type=size, default=0, metavar="N", help="requests before the clock")
    add("--ignore-eos", action="store_true", help="answers have exactly the length asked for")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="added to each request")
    for name, kind in SAMPLING:
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help="+ e2el")
    add("--metric-percentiles", default="99", metavar="LIST", help="default: 99")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request's figures")
    add("--result-dir", type=Path, metavar="DIR")
    add("--result-filename", metavar="FILE")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="noted in the file")
    add("--label", metavar="TEXT")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="one JSON document on standard output")


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for values that make no sense together."""
    names = args.percentile_metrics.split(",")
    unknown = [name for name in names if name not in METRIC_NAMES]
    if unknown:
        raise UsageError(f"--percentile-metrics {unknown[0]!r}: of {', '.join(METRIC_NAMES)}")
    try:
        args.percentiles = [float(word) for word in args.metric_percentiles.split(",")]
    except ValueError:
        raise UsageError("--metric-percentiles is a list of numbers, as 50,90,99") from None
    if not all(0 <= percent <= 100 for percent in args.percentiles):
        raise UsageError("--metric-percentiles are between 0 and 100")
    if args.request_rate <= 0 or args.burstiness <= 0:
        raise UsageError("--request-rate and --burstiness are above 0")
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if any(value is not None for value in ramp):
            raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    elif not all(value and value > 0 for value in ramp) or not math.isinf(args.request_rate):
        raise UsageError(
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0, "
            "and no --request-rate"
        )
    if args.dataset_name in ("sharegpt", "custom") and args.dataset_path is None:
        raise UsageError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if not isinstance(args.extra_body, dict):
        raise UsageError("--extra-body is a JSON object")
    for pair in (*args.header, *args.metadata):
        if "=" not in pair:
            raise UsageError(f"{pair!r} is not KEY=VALUE")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make the prompts, wait for the server, send the load, compute the figures."""
    from twostep.entrypoints.load.arrivals import send_times
    from twostep.entrypoints.load.http_stream import HttpPool
    from twostep.entrypoints.load.results import details, parse_goodput, summarise
    from twostep.entrypoints.load.run import first_model, run_load, wait_until_ready

    goodput = parse_goodput(args.goodput)
    pool = HttpPool(args.base_url or f"http://{args.host}:{args.port}", insecure=args.insecure)
    headers = dict(pair.split("=", 1) for pair in args.header)
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    model = args.model or await first_model(pool, headers)
    target = make_target(args, args.served_model_name or model, headers)
    tokenizer_name = args.tokenizer or model
    prompts = make_prompts(args, load_tokenizer_of(tokenizer_name))
    await wait_until_ready(pool, target, prompts[0], args.ready_check_timeout_sec)
    if args.num_warmups:
        warmups = [prompts[index % len(prompts)] for index in range(args.num_warmups)]
        await run_load(
            pool, target, warmups, [0.0] * len(warmups), max_concurrency=args.max_concurrency
        )
    reporter = Silent() if args.disable_tqdm else reporter_for()
    with reporter.count("requests", len(prompts), "req") as on_done:
        outcomes, duration = await run_load(
            pool,
            target,
            prompts,
            send_times(len(prompts), make_rate(args), args.seed),
            max_concurrency=args.max_concurrency,
            on_done=on_done,
        )
    pool.close()
    result = describe(args, model, tokenizer_name, len(prompts)) | summarise(
        outcomes,
        duration,
        metrics=args.percentile_metrics.split(","),
        percentiles=args.percentiles,
        goodput=goodput,
    )
    if args.save_detailed:
        result |= details(outcomes)
    errors = sorted({outcome.error for outcome in outcomes if outcome.error})
    for error in errors[:3]:
        print(f"failed: {error}", file=sys.stderr)
    return result


def make_target(args: argparse.Namespace, model: str, headers: dict[str, str]) -> Target:
    """What every request says."""
    from twostep.entrypoints.load.client import ENDPOINTS, Target

    body: dict[str, Any] = {
        name: getattr(args, name) for name, _ in SAMPLING if getattr(args, name) is not None
    }
    body.setdefault("temperature", 0.0)
    if args.ignore_eos:
        body["ignore_eos"] = True
    return Target(
        backend=args.backend,
        endpoint=args.endpoint or ENDPOINTS[args.backend],
        model=model,
        headers=headers,
        body=body | args.extra_body,
    )


def make_rate(args: argparse.Namespace) -> Rate:
    """How requests arrive."""
    from twostep.entrypoints.load.arrivals import Rate

    return Rate(
        args.request_rate,
        args.burstiness,
        args.ramp_up_strategy,
        args.ramp_up_start_rps or 0.0,
        args.ramp_up_end_rps or 0.0,
    )


def load_tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model that is on disk."""
    from twostep.entrypoints.resolve import resolve
    from twostep.entrypoints.text_side import load_tokenizer
    from twostep.models.loader.open import open_checkpoint

    try:
        return load_tokenizer(open_checkpoint(resolve(model, reporter_for()).path))
    except Exception as error:
        raise UsageError(
            f"no tokenizer for {model!r} ({error}): give --tokenizer, a model name, .gguf file "
            "or folder"
        ) from error


def make_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    """The dataset that was asked for."""
    from twostep.entrypoints.load import datasets

    count, seed = args.num_prompts, args.seed
    if args.dataset_name == "random":
        return datasets.random_prompts(
            tokenizer,
            count,
            input_len=args.input_len or args.random_input_len,
            output_len=args.output_len or args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=seed,
        )
    if args.dataset_name == "prefix_repetition":
        return datasets.prefix_repetition_prompts(
            tokenizer,
            count,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.output_len or args.prefix_repetition_output_len,
            seed=seed,
        )
    if args.dataset_name == "sharegpt":
        length = args.output_len or args.sharegpt_output_len
        return datasets.sharegpt_prompts(
            tokenizer, args.dataset_path, count, output_len=length, seed=seed
        )
    length = args.output_len or args.custom_output_len
    return datasets.custom_prompts(tokenizer, args.dataset_path, count, output_len=length)


def describe(
    args: argparse.Namespace, model: str, tokenizer_name: str, num_prompts: int
) -> dict[str, Any]:
    """What was run, for the file."""
    now = datetime.datetime.now()
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": tokenizer_name,
        "num_prompts": num_prompts,
        **dict(pair.split("=", 1) for pair in args.metadata),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def print_result(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the figures; write the file if one was asked for."""
    from twostep.entrypoints.load.results import table

    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(table(result, args.percentile_metrics.split(","), args.percentiles))
    if args.save_result or args.save_detailed or args.result_filename:
        rate = f"{result['request_rate']}qps"
        crowd = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        base = str(result["model_id"]).split("/")[-1]
        name = args.result_filename or f"{args.backend}-{rate}{crowd}-{base}-{result['date']}.json"
        path = (args.result_dir or Path()) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        print(f"written: {path}", file=sys.stderr)
