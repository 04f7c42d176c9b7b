"""``twostep bench scheduler``: what planning costs the host, per step, without any model.

Drives ``Scheduler`` and ``AsyncScheduler`` themselves: only ``schedule`` and
``update_from_output`` are timed; the results they are fed are made between the clock readings.
"""

from __future__ import annotations

import gc
import json
import statistics
import time

import msgspec
import msgspec.structs

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.cli.args import Parser, positive_size
from twostep.scheduler.async_scheduler import AsyncScheduler
from twostep.scheduler.scheduler import Scheduler

DECODES = (1, 64, 256, 1024)
PROMPT_TOKENS = 100
LONG_PROMPT_TOKENS = 20_000
MAX_MODEL_LEN = 32_768
BLOCK_SIZE = 16
WARMUP = 50
"""Steps before the clock counts: the interpreter specialises hot code first."""
PREFILL_WARMUP = 90
"""Long prompts fill the pool first: from then on every new block evicts an old one."""


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of host time per step."""

    schedule_us: float
    update_us: float
    mean_us: float
    """Both together, mean over all steps: block boundaries and garbage collection included."""
    p50_us: float
    steps: int


class Clock:
    """The real clock, as the scheduler wants it."""

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic()


def run(argv: list[str]) -> int:
    """Measure and print."""
    parser = Parser(
        "twostep bench scheduler", "", "Host cost of the scheduler per step, without a model."
    )
    parser.add_argument("--steps", type=positive_size, default=400, help="steps timed per size")
    parser.add_argument(
        "--decodes",
        type=positive_size,
        nargs="+",
        default=list(DECODES),
        metavar="N",
        help="running decodes (default: 1 64 256 1024)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse(argv)
    report = measure(args.decodes, args.steps)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0


def measure(decodes: list[int], steps: int) -> dict[str, object]:
    """All sizes, both schedulers."""
    rows = []
    for is_async in (False, True):
        for count in decodes:
            cost = decode_cost(count, steps, is_async=is_async)
            rows.append(
                {"case": f"{count} decodes", "async": is_async, **msgspec.structs.asdict(cost)}
            )
        for count in (0, 64):
            cost = prefill_cost(count, max(1, steps // 2), is_async=is_async)
            name = f"{LONG_PROMPT_TOKENS}-token prompts in chunks, {count} decodes"
            rows.append({"case": name, "async": is_async, **msgspec.structs.asdict(cost)})
    return {"unit": "microseconds per step (schedule + update)", "rows": rows}


def decode_cost(count: int, steps: int, *, is_async: bool) -> Cost:
    """``count`` requests decode, one token each per step."""
    scheduler = make_scheduler(count, is_async=is_async)
    for number in range(count):
        # Lengths differ, so that blocks fill up at different steps, as they do in life.
        add(scheduler, f"request-{number}", PROMPT_TOKENS + number % BLOCK_SIZE)
    return time_steps(scheduler, warmup=WARMUP, steps=steps, is_async=is_async)


def prefill_cost(decodes: int, steps: int, *, is_async: bool) -> Cost:
    """Long prompts run in chunks, one after the other, beside ``decodes`` running ones."""
    scheduler = make_scheduler(decodes + 1, is_async=is_async)
    for number in range(decodes):
        add(scheduler, f"request-{number}", PROMPT_TOKENS)
    # Kept, as a front end keeps them: freeing their numbers is not the cost of a step.
    prompts = [
        add(scheduler, f"long-{number}", LONG_PROMPT_TOKENS, max_tokens=1)
        for number in range((PREFILL_WARMUP + steps) // 2)
    ]
    assert prompts
    return time_steps(scheduler, warmup=PREFILL_WARMUP, steps=steps, is_async=is_async)


def make_scheduler(num_seqs: int, *, is_async: bool) -> Scheduler:
    """The seed's H100: 8192 tokens of budget, blocks of 16."""
    config = SchedulerConfig(
        max_num_batched_tokens=8192, max_num_seqs=num_seqs, max_model_len=MAX_MODEL_LEN
    )
    blocks = num_seqs * 64 + 16 * MAX_MODEL_LEN // BLOCK_SIZE
    cache = CacheConfig(num_blocks=blocks, block_size=BLOCK_SIZE)
    return (AsyncScheduler if is_async else Scheduler)(config, cache, Clock())


def add(scheduler: Scheduler, request_id: str, length: int, max_tokens: int = 30_000) -> list[int]:
    """Queue a request whose prompt shares nothing with the others; returns the prompt."""
    base = 7 * len(scheduler.requests)
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[(base + 31 * i) % 100_000 for i in range(length)],
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
        eos_token_id=None,
        arrival_time=0.0,
    )
    scheduler.add_request(scheduler.make_request(request))
    return request.prompt_token_ids


def time_steps(scheduler: Scheduler, *, warmup: int, steps: int, is_async: bool) -> Cost:
    """Run steps and take the clock around the two calls."""
    schedule_times: list[float] = []
    update_times: list[float] = []
    in_flight: list[SchedulerOutput] = []
    clock = time.perf_counter
    gc.collect()
    for number in range(warmup + steps):
        start = clock()
        plan = scheduler.schedule()
        middle = clock()
        in_flight.append(plan)
        schedule_times.append(middle - start)
        if len(in_flight) <= is_async:
            continue
        plan = in_flight.pop(0)
        output = fake_result(plan, number, scheduler)
        start = clock()
        scheduler.update_from_output(plan, output)
        update_times.append(clock() - start)
    schedule_times = schedule_times[-steps:]
    update_times = update_times[-steps:]
    both = [a + b for a, b in zip(schedule_times, update_times, strict=True)]
    return Cost(
        schedule_us=statistics.median(schedule_times) * 1e6,
        update_us=statistics.median(update_times) * 1e6,
        mean_us=statistics.fmean(both) * 1e6,
        p50_us=statistics.median(both) * 1e6,
        steps=steps,
    )


def fake_result(plan: SchedulerOutput, number: int, scheduler: Scheduler) -> ModelRunnerOutput:
    """One token for each request whose prompt is done, made outside the timed part."""
    ends = dict.fromkeys(plan.num_scheduled_tokens, True)
    for new in plan.scheduled_new_reqs:
        planned = new.num_computed_tokens + plan.num_scheduled_tokens[new.request_id]
        ends[new.request_id] = planned >= len(new.prefill_token_ids)
    cached = plan.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = scheduler.requests.get(request_id)
        if request is not None:
            planned = computed + plan.num_scheduled_tokens[request_id]
            ends[request_id] = planned >= request.num_prompt_tokens
    return ModelRunnerOutput(
        req_ids=list(ends),
        sampled_token_ids=[[1000 + number % 50_000] if end else [] for end in ends.values()],
    )


def table(report: dict[str, object]) -> str:
    """The report for people."""
    lines = [f"{'':<46}{'schedule':>9}{'update':>9}{'mean':>9}{'p50':>9}  µs per step"]
    rows = report["rows"]
    assert isinstance(rows, list)
    for row in rows:
        name = f"{'async' if row['async'] else 'sync'}, {row['case']}"
        lines.append(
            f"{name:<46}{row['schedule_us']:>9.1f}{row['update_us']:>9.1f}"
            f"{row['mean_us']:>9.1f}{row['p50_us']:>9.1f}"
        )
    return "\n".join(lines)
