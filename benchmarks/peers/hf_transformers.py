"""Hugging Face transformers on PyTorch, bf16, in vLLM's environment: static batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.cells import Request
from benchmarks.models import Model
from benchmarks.peers.base import SAMPLING, Engine, Limits
from benchmarks.peers.vllm_cpu import installed_version
from benchmarks.peers.worker_engine import WorkerEngine

NAME = "transformers"


class HfTransformers:
    """See ``base.Peer``."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        self._python = folder / "vllm" / "bin" / "python"

    def is_installed(self) -> bool:
        """Whether the interpreter is there."""
        return self._python.exists()

    def version(self) -> str:
        """The package's, with PyTorch's."""
        found = installed_version(self._python, "transformers")
        return f"{found}, torch {installed_version(self._python, 'torch')}"

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Reads Hugging Face folders only; it has no loop that takes requests as they come."""
        if model.hf is None:
            return []
        return [
            WorkerEngine(
                peer=NAME,
                name=NAME,
                python=str(self._python),
                module="hf_transformers",
                model=model,
                path=str(model.hf),
                limits=limits,
                environment={"HF_HUB_OFFLINE": "1"},
                kinds=frozenset({"prefill", "decode", "start"}),
            )
        ]


class Session:
    """The worker's side."""

    def load(self, model: dict[str, Any], limits: dict[str, Any]) -> None:
        """Greedy and sampled generation with the model's own ``generate``."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(limits["threads"])
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model["path"], dtype=torch.bfloat16)
        self.model.eval()

    def run(self, requests: list[Request], *, cached: bool, greedy: bool) -> list[dict[str, Any]]:
        """One batch; prompts must have one length and one ``max_tokens``. Greedy: one by one."""
        if greedy:
            return [answer for each in requests for answer in self._batch([each], greedy=True)]
        return self._batch(requests, greedy=False)

    def _batch(self, requests: list[Request], *, greedy: bool) -> list[dict[str, Any]]:
        lengths = {(len(request.prompt), request.max_tokens) for request in requests}
        if len(lengths) != 1:
            raise ValueError("a static batch needs prompts and answers of one length")
        [(length, count)] = lengths
        times: list[float] = []
        started = time.perf_counter()

        def note(ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter() - started)  # the forward pass of one token has ended
            return scores

        self.torch.manual_seed(0)
        prompts = self.torch.tensor([request.prompt for request in requests])
        options = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, **SAMPLING}
        with self.torch.inference_mode():
            out = self.model.generate(
                prompts,
                attention_mask=self.torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                logits_processor=[note],
                pad_token_id=0,
                **options,
            )
        times = [*times[1:], time.perf_counter() - started]  # the token comes after its scores
        return [{"times": times, "token_ids": row[length:].tolist()} for row in out]
