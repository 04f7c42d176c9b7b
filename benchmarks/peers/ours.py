"""twostep, through ``LLM``: sampling, prefix caching and asynchronous scheduling on."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from typing import Any

from benchmarks.cells import Request
from benchmarks.figures import Metrics
from benchmarks.models import Model
from benchmarks.peers import step_loop
from benchmarks.peers.base import SAMPLING, Engine, Limits
from benchmarks.peers.http_server import HttpServer
from benchmarks.peers.worker_engine import WorkerEngine
from benchmarks.process import first_output

NAME = "twostep"
SPARE_BYTES = 64 << 20
"""Of the KV cache, beyond what the cells need: the peers round up, too."""


class Ours:
    """See ``base.Peer``."""

    name = NAME

    def is_installed(self) -> bool:
        """Always: this program runs in its environment."""
        return True

    def version(self) -> str:
        """The package's."""
        return importlib.metadata.version("twostep")

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """One setting: the defaults."""
        return [OurEngine(model, limits)]


class OurEngine(WorkerEngine):
    """A worker; its start is measured on the command that users type."""

    def __init__(self, model: Model, limits: Limits, *, exact: bool = False) -> None:
        path = str(model.gguf or model.hf)
        kv_bytes = int(1.1 * limits.kv_tokens * model.shape.kv_bytes_per_token) + SPARE_BYTES
        flags = [
            "--threads", str(limits.threads),
            *(["--quantization", model.quantization] if model.quantization else []),
        ]  # fmt: skip
        super().__init__(
            peer=NAME,
            name=NAME,
            python=sys.executable,
            module="ours",
            model=model,
            path=path,
            limits=limits,
            options={"quantization": model.quantization, "exact": exact, "kv_bytes": kv_bytes},
            http=HttpServer(
                lambda port: [
                    sys.executable, "-m", "twostep", "serve", path, "--port", str(port),
                    "--kv-cache-memory-bytes", str(kv_bytes),
                    "--max-num-seqs", str(limits.max_num_seqs),
                    "--max-model-len", str(limits.max_model_len), *flags,
                ]
            ),
        )  # fmt: skip
        self._start = [
            sys.executable, "-m", "twostep", "complete", path, "The capital of France is",
            "--max-tokens", "1", "--temperature", "0", *flags,
        ]  # fmt: skip

    def start(self) -> Metrics:
        """``twostep complete`` with one token."""
        seconds, peak = first_output(self._start, time.perf_counter)
        return {"seconds_to_first_token": seconds, "peak_rss_mb": peak}


class Session:
    """The worker's side."""

    def load(self, model: dict[str, Any], limits: dict[str, Any]) -> None:
        """``exact`` is the path that computes what the file says, in float32."""
        from twostep import LLM

        self.llm = LLM(
            model["path"],
            quantization=model["quantization"],
            linear_precision="bf16" if model["exact"] else "int8",
            threads=limits["threads"],
            max_num_seqs=limits["max_num_seqs"],
            max_model_len=limits["max_model_len"],
            kv_cache_memory_bytes=model["kv_bytes"],
        )

    def run(self, requests: list[Request], *, cached: bool, greedy: bool) -> list[dict[str, Any]]:
        """See ``step_loop.run``."""
        return step_loop.run(self, requests, cached=cached, greedy=greedy)

    def add(self, request: Request, *, greedy: bool) -> str:
        """See ``step_loop.Stepped``."""
        from twostep import SamplingParams
        from twostep.contracts.sampling import RequestOutputKind

        params = SamplingParams(
            **({"temperature": 0.0} if greedy else SAMPLING),
            max_tokens=request.max_tokens,
            seed=request.seed,
            ignore_eos=True,
        )
        params.output_kind = RequestOutputKind.DELTA
        return self.llm.add_request({"prompt_token_ids": request.prompt}, params)

    def step(self) -> list[tuple[str, list[int]]]:
        """See ``step_loop.Stepped``."""
        return [(each.request_id, list(each.outputs[0].token_ids)) for each in self.llm.step()]

    def busy(self) -> bool:
        """See ``step_loop.Stepped``."""
        return self.llm.has_unfinished_requests()

    def likeliest(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The likeliest next tokens of each prompt."""
        from twostep import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True),
            use_tqdm=False,
        )
        found = []
        for output in outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            ranked = sorted(logprobs[0].items(), key=lambda item: -item[1].logprob)
            found.append([token for token, _ in ranked[:count]])
        return found
