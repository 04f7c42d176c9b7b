"""vLLM's own Scheduler and AsyncScheduler, driven without a model: microseconds per step.

Runs in an environment of its own (``setup_vllm.sh``), never in ours; prints one JSON document in
the form of ``twostep bench scheduler --json``. Same shapes, same results fed, same clock readings.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import tempfile
import time

# vLLM reads it when it is imported, so the imports below come late (E402).
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

BLOCK_SIZE = 16
MAX_MODEL_LEN = 32_768
PREFILL_WARMUP = 90
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128_256,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "bfloat16",
}


def make_scheduler(folder, num_seqs, is_async):
    config = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=is_async,
    )
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    whole = VllmConfig(scheduler_config=config, model_config=model, cache_config=cache)
    num_blocks = num_seqs * 64 + 16 * MAX_MODEL_LEN // BLOCK_SIZE
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    kv = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    whole.cache_config.num_gpu_blocks = num_blocks
    kind = AsyncScheduler if is_async else Scheduler
    return kind(
        vllm_config=whole,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(whole),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def add(scheduler, hasher, request_id, length, max_tokens=30_000):
    base = 7 * len(scheduler.requests)
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    request = Request(
        request_id=request_id,
        prompt_token_ids=[(base + 31 * i) % 100_000 for i in range(length)],
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )
    scheduler.add_request(request)
    return request.prompt_token_ids


def time_steps(scheduler, warmup, steps, is_async):
    schedule_times, update_times, in_flight = [], [], []
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
    schedule_times, update_times = schedule_times[-steps:], update_times[-steps:]
    both = [a + b for a, b in zip(schedule_times, update_times, strict=True)]
    return {
        "schedule_us": statistics.median(schedule_times) * 1e6,
        "update_us": statistics.median(update_times) * 1e6,
        "mean_us": statistics.fmean(both) * 1e6,
        "p50_us": statistics.median(both) * 1e6,
        "steps": steps,
    }


def fake_result(plan, number, scheduler):
    ends = dict.fromkeys(plan.num_scheduled_tokens, True)
    for new in plan.scheduled_new_reqs:
        planned = new.num_computed_tokens + plan.num_scheduled_tokens[new.req_id]
        ends[new.req_id] = planned >= len(new.prompt_token_ids)
    cached = plan.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = scheduler.requests.get(request_id)
        if request is not None:
            planned = computed + plan.num_scheduled_tokens[request_id]
            ends[request_id] = planned >= request.num_prompt_tokens
    return ModelRunnerOutput(
        req_ids=list(ends),
        req_id_to_index={request_id: row for row, request_id in enumerate(ends)},
        sampled_token_ids=[[1000 + number % 50_000] if end else [] for end in ends.values()],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--mode", choices=["sync", "async", "both"], default="both")
    args = parser.parse_args()
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for is_async in {"sync": [False], "async": [True], "both": [False, True]}[args.mode]:
            for count in args.decodes:
                scheduler = make_scheduler(folder, count, is_async)
                for number in range(count):
                    add(scheduler, hasher, f"request-{number}", 100 + number % BLOCK_SIZE)
                cost = time_steps(scheduler, 50, args.steps, is_async)
                rows.append({"case": f"{count} decodes", "async": is_async, **cost})
            for count in (0, 64):
                scheduler = make_scheduler(folder, count + 1, is_async)
                for number in range(count):
                    add(scheduler, hasher, f"request-{number}", 100)
                steps = max(1, args.steps // 2)
                # As ours: kept, so that freeing the numbers is not timed.
                prompts = [
                    add(scheduler, hasher, f"long-{number}", 20_000, max_tokens=1)
                    for number in range((PREFILL_WARMUP + steps) // 2)
                ]
                assert prompts
                name = f"20000-token prompts in chunks, {count} decodes"
                cost = time_steps(scheduler, PREFILL_WARMUP, steps, is_async)
                rows.append({"case": name, "async": is_async, **cost})
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
