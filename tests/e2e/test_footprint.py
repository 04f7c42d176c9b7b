"""Memory: no more than the packed weights and a bit, the KV cache, and the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from twostep.entrypoints import catalogue, store

PROGRAM = """
import json, sys
from twostep import LLM, SamplingParams
with LLM(sys.argv[1], max_num_seqs=8, max_model_len=2048, kv_cache_memory_bytes=96 << 20) as llm:
    llm.generate(["Hello"] * 8, SamplingParams(max_tokens=32, temperature=0), use_tqdm=False)
    ids = [100 + i % 3000 for i in range(1500)]
    params = SamplingParams(max_tokens=8, logprobs=5)
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    # Not ru_maxrss: it starts at what the parent held when it made this process.
    with open("/proc/self/status") as status:
        [peak] = [int(line.split()[1]) for line in status if line.startswith("VmHWM:")]
    print(json.dumps({
        "peak": peak * 1024,
        "weights": llm.boot.weight_bytes,
        "kv": llm.boot.kv_sizing.total_bytes,
        "torch": sorted({"torch", "transformers"} & set(sys.modules)),
    }))
"""


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_peak_memory_is_weights_and_kv_and_little_else(name: str) -> None:
    entry = catalogue.find(name)
    assert entry is not None
    if not store.is_present(entry):
        pytest.skip(f"{name} is not on disk; `twostep pull {name}` fetches it")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store.path_of(entry))],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["weights"] > 0.9 * entry.size_bytes
    assert found["peak"] <= found["weights"] * 1.15 + found["kv"] + 200e6, found
    assert found["torch"] == []
