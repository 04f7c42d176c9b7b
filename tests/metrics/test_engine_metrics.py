"""What is counted while a real engine core plans a random load: the invariants of §4.1's names."""

from __future__ import annotations

import random
from collections import Counter

from helpers.finished_stats import finished
from helpers.toy_engine import make_toy

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.outputs import SchedulerStats, SpecDecodeStats
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.contracts.sampling import RequestOutputKind, SamplingParams
from twostep.contracts.stats import IterationStats
from twostep.frontend.input_processor import ProcessedRequest
from twostep.frontend.output_processor import OutputProcessor
from twostep.metrics.engine_metrics import EngineMetrics

INFO = EngineInfo(
    model="m",
    model_path="p",
    architecture="llama",
    vocab_size=50,
    max_model_len=40,
    block_size=4,
    num_gpu_blocks=12,
    kv_cache_dtype="bf16",
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_threads=2,
    heartbeat_timeout=10.0,
    version="0",
)

COUNTERS = [
    "prompt_tokens",
    "cached_prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
]


def make_processed(request_id: str, prompt: list[int], max_tokens: int, n: int) -> ProcessedRequest:
    params = SamplingParams(
        n=n, max_tokens=max_tokens, output_kind=RequestOutputKind.CUMULATIVE, detokenize=False
    )
    core_requests = [
        EngineCoreRequest(
            request_id=f"{i}_{request_id}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, seed=i),
            eos_token_id=3,
            arrival_time=0.0,
        )
        for i in range(n)
    ]
    return ProcessedRequest(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt,
        params=params,
        stop_texts={},
        core_requests=core_requests,
    )


def test_invariants_under_a_random_load() -> None:
    rng = random.Random(7)
    toy = make_toy(num_blocks=13)

    def fault(plan: SchedulerOutput) -> BaseException | None:
        return RuntimeError("poison") if "0_r7" in plan.num_scheduled_tokens else None

    toy.executor.fail_result = fault
    core = toy.core(None)
    front = OutputProcessor(None, clock=toy.clock.monotonic)
    metrics = EngineMetrics("served", INFO)
    generated: dict[tuple[str, int], int] = {}
    last_stats: SchedulerStats | None = None
    num_sequences = 0
    seen: Counter[str] = Counter()

    def step() -> None:
        nonlocal last_stats
        news, _ = core.step_fn()
        for outputs in (news or {}).values():
            iteration = IterationStats(timestamp=0.0)
            done = front.process_outputs(outputs.outputs, iteration)
            metrics.on_step(outputs.scheduler_stats, iteration)
            for finished in done.finished:
                metrics.on_finished(finished)
            for made in done.request_outputs:
                for completion in made.outputs:
                    generated[made.request_id, completion.index] = len(completion.token_ids)
            last_stats = outputs.scheduler_stats or last_stats
        for name in COUNTERS:
            value = getattr(metrics, name)
            assert value >= seen[name], f"{name} went down"
            seen[name] = value
        assert metrics.prompt_tokens >= metrics.cached_prompt_tokens >= 0
        assert metrics.prefix_cache_queries >= metrics.prefix_cache_hits
        if last_stats is not None:
            assert metrics.num_requests_running == last_stats.num_running_reqs
            assert metrics.num_requests_waiting == last_stats.num_waiting_reqs

    for number in range(60):
        n = rng.choice([1, 1, 1, 2])
        prompt = [(7 * i) % 50 + 10 for i in range(rng.randint(1, 20))]
        request = make_processed(f"r{number}", prompt, rng.randint(1, 15), n)
        front.add_request(request)
        for core_request in request.core_requests:
            core.add_request(core_request)
        num_sequences += n
        for _ in range(rng.randrange(6)):
            step()
        if rng.random() < 0.15:
            done = front.abort_requests([f"r{rng.randrange(number + 1)}"], with_stats=True)
            core.abort_requests(done.reqs_to_abort)
            for finished in done.finished:
                metrics.on_finished(finished)
            for made in done.request_outputs:
                for completion in made.outputs:
                    generated[made.request_id, completion.index] = len(completion.token_ids)
    while core.has_work():
        step()

    assert sum(metrics.finished.values()) == num_sequences
    assert metrics.finished[FinishReason.ABORT]
    assert metrics.finished[FinishReason.ERROR]
    assert metrics.finished[FinishReason.LENGTH]
    assert metrics.generation_tokens == sum(generated.values())
    assert metrics.num_preemptions
    assert metrics.prefix_cache_hits
    assert metrics.cached_prompt_tokens
    assert metrics.num_requests_running == metrics.num_requests_waiting == 0
    assert metrics.kv_cache_usage == 0
    # Every sequence with tokens has one first token; the others are between tokens.
    num_started = sum(count > 0 for count in generated.values())
    assert metrics.time_to_first_token.count == num_started
    assert metrics.inter_token_latency.count <= metrics.generation_tokens - num_started
    assert metrics.request_generation_tokens.sum == metrics.generation_tokens
    assert metrics.e2e_latency.count == num_sequences
    assert metrics.request_params_n.count == 60
    assert metrics.request_params_n.sum == num_sequences
    # Times follow one another: queue + prefill + decode fits into the whole.
    parts = metrics.queue_time.sum + metrics.prefill_time.sum + metrics.decode_time.sum
    assert 0 < parts <= metrics.e2e_latency.sum
    assert metrics.inference_time.sum > metrics.decode_time.sum > 0
    core.shutdown()


def test_a_request_of_several_sequences_counts_once_where_it_is_one() -> None:
    metrics = EngineMetrics("served", INFO)
    metrics.on_finished(finished(n=2, is_last=False, num_generation_tokens=9))
    assert metrics.request_params_n.count == 0
    metrics.on_finished(finished(n=2, index=1, num_generation_tokens=3))
    assert metrics.request_params_n.sum == 2
    assert metrics.request_max_num_generation_tokens.sum == 9
    assert metrics.request_generation_tokens.sum == 12
    assert metrics.request_prompt_tokens.sum == 10
    assert metrics.time_per_output_token.sum == 2.0 / 8 + 2.0 / 2
    assert metrics.request_prefill_kv_computed.sum == 12


def test_a_request_that_never_started_has_no_times_of_its_phases() -> None:
    metrics = EngineMetrics("served", INFO)
    never = finished(
        finish_reason=FinishReason.ABORT,
        num_generation_tokens=0,
        queued_time=0.0,
        prefill_time=0.0,
        decode_time=0.0,
        time_to_first_token=0.0,
    )
    metrics.on_finished(never)
    assert metrics.e2e_latency.count == 1
    assert metrics.queue_time.count == metrics.prefill_time.count == 0


def test_drafts_add_up_by_position() -> None:
    metrics = EngineMetrics("served", INFO)
    for accepted in ([2, 1], [1, 1, 1]):
        drafts = SpecDecodeStats(
            num_drafts=2,
            num_draft_tokens=6,
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=accepted,
        )
        stats = SchedulerStats(
            num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.5, spec_decode=drafts
        )
        metrics.on_step(stats, IterationStats(timestamp=0.0))
    assert metrics.num_accepted_per_pos == [3, 2, 1]
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 12, 6)


def test_gauges_come_to_rest_after_an_abort() -> None:
    toy = make_toy(num_blocks=13)
    core = toy.core(None)
    metrics = EngineMetrics("served", INFO)
    for request in make_processed("r", [10] * 6, 12, 2).core_requests:
        core.add_request(request)

    def step() -> None:
        news, _ = core.step_fn()
        for outputs in (news or {}).values():
            metrics.on_step(outputs.scheduler_stats, IterationStats(timestamp=0.0))

    for _ in range(4):
        step()
    assert metrics.num_requests_running == 2
    assert metrics.kv_cache_usage > 0
    core.abort_requests(["0_r", "1_r"])
    while core.has_work():
        step()
    assert metrics.num_requests_running == 0
    assert metrics.kv_cache_usage == 0
    core.shutdown()
