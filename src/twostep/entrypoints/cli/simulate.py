"""``twostep simulate``: capacity planning. The real scheduler on a device that is a cost model."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from typing import TYPE_CHECKING, Any

import msgspec.structs

from twostep.config.engine import DEFAULT_PREFILL_BURST_TOKENS
from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.engine import tell_watch
from twostep.entrypoints.tracing.watch import Watch

if TYPE_CHECKING:
    from twostep.config.engine import SchedulerConfig
    from twostep.kv_cache.sizing import KVCacheSizing
    from twostep.sim.capacity import CapacityFigures
    from twostep.sim.device import SimDevice
    from twostep.sim.model_facts import ModelFacts
    from twostep.sim.traffic import Traffic

DESCRIPTION = """\
Predict throughput and latency of a model on a device that is not here: the real
engine core plans every step, a cost model says how long the device would take.
All times are virtual.

MODEL     {models}, a config.json,
          or a directory that holds one
--device  {devices},
          or cpu: this machine, measured now (takes a second)

`twostep simulate check` drives the engine core with random users and looks for
broken rules.
"""

GIB = 1 << 30


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    if argv and argv[0] == "check":
        check = importlib.import_module("twostep.entrypoints.cli.simulate_check")
        result: int = check.run(argv[1:])
        return result
    args = make_parser().parse(argv)
    from twostep.sim.build import build_sim_core, plan_sizes
    from twostep.sim.capacity import simulate
    from twostep.sim.model_facts import load_model_facts

    traffic = make_traffic(args)
    facts = load_model_facts(args.model, dtype=args.dtype, kv_dtype=args.kv_cache_dtype)
    device = make_device(args.device)
    names = (
        "usage", "max_num_batched_tokens", "max_num_seqs", "max_model_len",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size",
        "async_scheduling", "long_prefill_token_threshold", "prefill_burst_tokens",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in names}
    config, sizing = plan_sizes(facts, device, **options)
    check_lengths(traffic, config.max_model_len)
    with contextlib.closing(Watch(args.trace, args.record)) as watch:
        core, executor, clock = build_sim_core(
            facts,
            device,
            enable_prefix_caching=args.enable_prefix_caching,
            observe=watch.begin,
            executor_options={"history": 0, "enforce_eager": args.enforce_eager},
            **options,
        )
        figures = simulate(core, executor, clock, traffic)
    tell_watch(watch)
    document = report(args, facts, device, config, sizing, traffic, figures)
    if args.json:
        console.print_json(document)
    else:
        print(console.table(rows(document)))
    return 0


def make_parser() -> cli_args.Parser:
    """All flags."""
    from twostep.sim.device import DEVICES
    from twostep.sim.known_models import KNOWN_MODELS
    from twostep.sim.model_facts import KV_BYTES, WEIGHT_BYTES

    parser = cli_args.Parser(
        "twostep simulate",
        "MODEL",
        DESCRIPTION.format(models=", ".join(KNOWN_MODELS), devices=", ".join(DEVICES)),
    )
    add = parser.add_argument
    size = cli_args.positive_size
    add("model", metavar="MODEL")
    add("--device", default="h100", metavar="NAME", help="see above (default: h100)")
    add("--json", action="store_true", help="one JSON document on standard output")
    group = parser.add_argument_group("traffic")
    add = group.add_argument
    add("--num-requests", type=size, default=256, metavar="N", help="default: 256")
    add("--request-rate", type=float, metavar="R", help="requests a second, Poisson (default: 4)")
    add("--concurrency", type=size, metavar="N", help="instead: users, one request each at a time")
    add("--input-len", type=length_range, default="1024", metavar="N|A-B", help="default: 1024")
    add("--output-len", type=length_range, default="128", metavar="N|A-B", help="default: 128")
    add(
        "--shared-prefix-len", type=cli_args.size, default=0, metavar="N",
        help="tokens that all prompts begin with",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="S", help="same seed, same requests (default: 0)")
    group = parser.add_argument_group("engine (defaults: vLLM's for the device)")
    add = group.add_argument
    add("--usage", choices=["api", "offline"], default="api", help="whose defaults (default: api)")
    add("--max-num-seqs", type=size, metavar="N", help="requests running at once")
    add("--max-num-batched-tokens", type=size, metavar="N", help="tokens of one step")
    add("--max-model-len", type=size, metavar="N", help="default: what the model was trained for")
    add("--long-prefill-token-threshold", type=cli_args.size, default=0, metavar="N")
    add("--prefill-burst-tokens", type=cli_args.size, default=DEFAULT_PREFILL_BURST_TOKENS,
        metavar="N")  # fmt: skip
    add("--gpu-memory-utilization", type=share, default=0.92, metavar="X", help="default: 0.92")
    add("--kv-cache-memory-bytes", type=size, metavar="SIZE", help="default: what is left")
    add("--tensor-parallel-size", "-tp", type=size, default=1, metavar="N", help="devices")
    add("--dtype", choices=list(WEIGHT_BYTES), default="bf16", help="weights")
    add("--kv-cache-dtype", choices=list(KV_BYTES), default="bf16", help="KV cache")
    add("--enforce-eager", action="store_true", help="no graphs: every kernel is launched alone")
    for name in ("enable-prefix-caching", "async-scheduling"):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    cli_args.add_watch_flags(parser)
    return parser


def length_range(text: str) -> Any:
    """``512`` or ``100-2000`` tokens."""
    from twostep.sim.traffic import LengthRange

    match = re.fullmatch(r"(\d+[kK]?)(?:-(\d+[kK]?))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length: write 512 or 100-2000")
    low = cli_args.positive_size(match[1])
    high = low if match[2] is None else cli_args.positive_size(match[2])
    if high < low:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return LengthRange(low, high)


def share(text: str) -> float:
    """More than 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: more than 0, at most 1")
    return value


def make_traffic(args: argparse.Namespace) -> Traffic:
    """The traffic that the flags describe."""
    from twostep.sim.traffic import Traffic

    rate = args.request_rate
    if rate is not None and args.concurrency is not None:
        raise UsageError("--request-rate and --concurrency exclude each other: give one")
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"--request-rate {rate}: must be more than 0")
    if rate is None and args.concurrency is None:
        rate = 4.0
    return Traffic(
        num_requests=args.num_requests,
        input_len=args.input_len,
        output_len=args.output_len,
        request_rate=rate,
        concurrency=args.concurrency,
        shared_prefix_len=args.shared_prefix_len,
        seed=args.seed,
    )


def check_lengths(traffic: Traffic, max_model_len: int) -> None:
    """Refuse what no request of this engine may be."""
    longest = traffic.input_len.high + traffic.output_len.high
    if longest > max_model_len:
        raise UsageError(
            f"--input-len {traffic.input_len} and --output-len {traffic.output_len} make up to "
            f"{longest} tokens, but --max-model-len is {max_model_len}: ask for less"
        )


def make_device(name: str) -> SimDevice:
    """A device by name, or this machine."""
    from twostep.sim.device import cpu_device, find_device

    if name.lower() != "cpu":
        return find_device(name)
    from twostep import _native as native
    from twostep.entrypoints.cli.doctor import BANDWIDTH_MEGABYTES
    from twostep.entrypoints.cpu_speed import measure_matmul
    from twostep.entrypoints.machine import inspect_machine

    machine = inspect_machine()
    if machine.available_memory is None:
        raise UsageError("the system does not say how much memory is free: name another --device")
    threads = machine.usable_cpus
    return cpu_device(
        name=f"{machine.cpu_model}, {threads} threads",
        memory_bandwidth=native.measure_bandwidth(threads, BANDWIDTH_MEGABYTES) * 1e9,
        memory_bytes=machine.available_memory,
        peak_flops=measure_matmul(native.make_device(""), threads),
    )


def report(
    args: argparse.Namespace,
    facts: ModelFacts,
    device: SimDevice,
    config: SchedulerConfig,
    sizing: KVCacheSizing,
    traffic: Traffic,
    figures: CapacityFigures,
) -> dict[str, Any]:
    """The JSON document. Seconds, bytes, tokens."""
    return {
        "model": {
            "name": facts.name,
            "num_params": facts.num_params,
            "dtype": facts.dtype,
            "weight_bytes": facts.weight_bytes,
            "kv_bytes_per_token": facts.kv_bytes_per_token,
        },
        "device": {
            "name": device.name,
            "count": args.tensor_parallel_size,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "memory_bytes": device.memory_bytes,
            "compute_efficiency": device.compute_efficiency,
            "bandwidth_efficiency": device.bandwidth_efficiency,
        },
        "engine": {
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": config.max_model_len,
            "async_scheduling": config.async_scheduling,
            "enforce_eager": args.enforce_eager,
            "block_size": sizing.block_size,
            "num_kv_blocks": sizing.num_blocks,
            "kv_cache_tokens": sizing.num_tokens,
            "max_concurrency": round(sizing.max_concurrency, 2),
        },
        "traffic": {
            **msgspec.structs.asdict(traffic),
            "input_len": str(traffic.input_len),
            "output_len": str(traffic.output_len),
        },
        "results": results(figures),
    }


def results(figures: CapacityFigures) -> dict[str, Any]:
    """What came out, in virtual time."""
    from twostep.sim.capacity import percentile

    requests = list(figures.requests.values())
    input_tokens = sum(times.input_len for times in requests)
    output_tokens = sum(times.output_len for times in requests)
    seconds, steps = figures.duration, figures.num_steps

    def spread(values: list[float]) -> dict[str, float | None]:
        return {f"p{percent}": percentile(values, percent) for percent in (50, 99)}

    return {
        "duration_s": seconds,
        "requests": len(requests),
        "requests_per_s": len(requests) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (input_tokens + output_tokens) / seconds,
        "input_tokens": input_tokens,
        "cached_tokens": sum(times.num_cached_tokens for times in requests),
        "output_tokens": output_tokens,
        "ttft_s": spread([times.ttft for times in requests]),
        "tpot_s": spread([times.tpot for times in requests if times.tpot is not None]),
        "e2e_s": spread([times.e2e for times in requests]),
        "steps": steps,
        "mean_batch_requests": figures.num_batched_requests / steps,
        "mean_batch_tokens": figures.num_batched_tokens / steps,
        "graph_modes": figures.graph_modes,
        "peak_running": figures.peak_running,
        "peak_waiting": figures.peak_waiting,
        "peak_kv_usage": figures.peak_kv_usage,
        "preemptions": figures.num_preemptions,
        "device_busy_share": figures.device_busy / seconds,
        "device_seconds": figures.device_seconds,
    }


def rows(document: dict[str, Any]) -> list[list[str]]:
    """The table for people."""
    model, device, engine = document["model"], document["device"], document["engine"]
    found = document["results"]
    count = "" if device["count"] == 1 else f"{device['count']} × "
    busy = sum(found["device_seconds"].values())
    parts = [
        f"{term} {seconds / busy:.0%}"
        for term, seconds in sorted(found["device_seconds"].items(), key=lambda item: -item[1])
        if seconds / busy >= 0.005
    ]
    modes = ", ".join(
        f"{mode} {steps / found['steps']:.0%}"
        for mode, steps in sorted(found["graph_modes"].items(), key=lambda item: -item[1])
        if steps / found["steps"] >= 0.005
    )
    return [
        ["model", f"{model['name']}, {model['num_params'] / 1e9:.2f} B parameters, "
         f"{model['dtype']}, {model['weight_bytes'] / GIB:.1f} GiB"],
        ["device", f"{count}{device['name']}"],
        ["engine", f"{engine['max_num_batched_tokens']} tokens and {engine['max_num_seqs']} "
         "requests a step at most"],
        ["KV cache", f"{engine['num_kv_blocks']} blocks, {engine['kv_cache_tokens']} tokens: "
         f"{engine['max_concurrency']:.1f} requests of {engine['max_model_len']}"],
        ["throughput", f"{found['output_tokens_per_s']:.0f} output tokens/s, "
         f"{found['total_tokens_per_s']:.0f} with input; {found['requests_per_s']:.2f} requests/s"],
        ["TTFT", _times(found["ttft_s"])],
        ["TPOT", _times(found["tpot_s"])],
        ["E2E", _times(found["e2e_s"])],
        ["batch", f"{found['mean_batch_requests']:.1f} requests, "
         f"{found['mean_batch_tokens']:.0f} tokens on average, {found['steps']} steps"],
        ["graphs", modes],
        ["KV use", f"{found['peak_kv_usage']:.0%} at most; {found['preemptions']} preemptions; "
         f"{found['cached_tokens'] / found['input_tokens']:.0%} of input cached"],
        ["queue", f"{found['peak_running']} running, {found['peak_waiting']} waiting at most"],
        ["busy", f"{found['device_busy_share']:.0%} of {found['duration_s']:.1f} virtual seconds"],
        ["device time", ", ".join(parts)],
    ]  # fmt: skip


def _times(spread: dict[str, float | None]) -> str:
    """``p50 12.3 ms, p99 4.56 s``."""
    if spread["p50"] is None:
        return "no request has two tokens"
    return ", ".join(
        f"{name} {1000 * value:.1f} ms" if value < 1 else f"{name} {value:.2f} s"
        for name, value in spread.items()
        if value is not None
    )
