"""OpenVINO GenAI on the CPU, reading GGUF files itself; ``setup_openvino.sh`` installs it.

Two settings: ``ContinuousBatchingPipeline``, stepped by us, and ``LLMPipeline``, one prompt a time.
"""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.cells import Request
from benchmarks.models import Model
from benchmarks.peers import step_loop
from benchmarks.peers.base import SAMPLING, Engine, Limits
from benchmarks.peers.vllm_cpu import installed_version
from benchmarks.peers.worker_engine import ALL_KINDS, WorkerEngine

NAME = "openvino"


class OpenVino:
    """See ``base.Peer``."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        self._python = folder / "openvino" / "bin" / "python"

    def is_installed(self) -> bool:
        """Whether its interpreter is there."""
        return self._python.exists()

    def version(self) -> str:
        """The package's."""
        return installed_version(self._python, "openvino-genai")

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Reads GGUF files only: making its own format needs a converter that is not on offer."""
        if model.gguf is None:
            return []
        kv_bytes = limits.kv_tokens * model.shape.kv_bytes_per_token
        settings = (("batching", ALL_KINDS), ("llm", frozenset({"prefill", "decode", "start"})))
        return [
            WorkerEngine(
                peer=NAME,
                name=f"{NAME} {setting}",
                python=str(self._python),
                module="openvino_llm",
                model=model,
                path=str(model.gguf),
                limits=limits,
                options={"setting": setting, "cache_gb": math.ceil(1.1 * kv_bytes / 2**30)},
                kinds=kinds,
                max_batch=1 if setting == "llm" else 1 << 30,
            )
            for setting, kinds in settings
        ]


class Session:
    """The worker's side."""

    def load(self, model: dict[str, Any], limits: dict[str, Any]) -> None:
        """With the pipeline that ``setting`` names."""
        import openvino_genai as genai

        warnings.simplefilter("ignore", DeprecationWarning)
        self.genai = genai
        self.setting = model["setting"]
        properties = {"INFERENCE_NUM_THREADS": limits["threads"]}
        if self.setting == "llm":
            self.pipeline = genai.LLMPipeline(model["path"], "CPU", **properties)
            return
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = model["cache_gb"]
        scheduler.max_num_seqs = limits["max_num_seqs"]
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(
            model["path"], scheduler, "CPU", properties
        )
        self._count = 0
        self._handles: dict[str, Any] = {}

    def run(self, requests: list[Request], *, cached: bool, greedy: bool) -> list[dict[str, Any]]:
        """See ``step_loop.run``; with ``LLMPipeline`` one request after the other."""
        if self.setting == "llm":
            return [self._alone(request, greedy=greedy) for request in requests]
        return step_loop.run(self, requests, cached=cached, greedy=greedy)

    def add(self, request: Request, *, greedy: bool) -> str:
        """See ``step_loop.Stepped``."""
        self._count += 1
        self._handles[str(self._count)] = self.pipeline.add_request(
            self._count, self._tensor(request.prompt), self._config(request, greedy=greedy)
        )
        return str(self._count)

    def step(self) -> list[tuple[str, list[int]]]:
        """See ``step_loop.Stepped``."""
        self.pipeline.step()
        news = []
        for request_id, handle in list(self._handles.items()):
            token_ids = []
            ended = False
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += list(output.generated_ids)
                    ended = output.finish_reason.name != "NONE"
            if token_ids:
                news.append((request_id, token_ids))
            if ended:
                del self._handles[request_id]
        return news

    def busy(self) -> bool:
        """See ``step_loop.Stepped``."""
        return bool(self.pipeline.has_non_finished_requests())

    def _alone(self, request: Request, *, greedy: bool) -> dict[str, Any]:
        genai, times = self.genai, []

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]  # its module has no types
            def write(self, token: Any) -> Any:
                count = len(token) if isinstance(token, list) else 1
                times.extend([time.perf_counter() - started] * count)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        started = time.perf_counter()
        result = self.pipeline.generate(
            self._tensor(request.prompt), self._config(request, greedy=greedy), Streamer()
        )
        return {"times": times, "token_ids": list(result.tokens[0])}

    def _tensor(self, prompt: list[int]) -> Any:
        import numpy as np
        import openvino

        return openvino.Tensor(np.array([prompt], dtype=np.int64))

    def _config(self, request: Request, *, greedy: bool) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = not greedy
        if not greedy:
            config.rng_seed = request.seed
            config.temperature, config.top_p = SAMPLING["temperature"], SAMPLING["top_p"]
        return config
