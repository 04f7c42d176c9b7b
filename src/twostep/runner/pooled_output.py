"""The vectors of a step that may still be running."""

from __future__ import annotations

from typing import Any

import numpy as np

from twostep.contracts.outputs import ModelRunnerOutput
from twostep.ops.cpu.device_model import SampledRows
from twostep.runner.async_output import LaunchTiming

DONE_TOKEN = 0
"""Stands in a result for the vector: the scheduler ends a request when it gets a token."""


class PooledOutput:
    """A ``StepFuture``: waits for the device, then hands over each request's vector."""

    def __init__(
        self,
        req_ids: list[str],
        launched: SampledRows,
        owners: list[str],
        pooled: Any,
        timing: LaunchTiming | None = None,
    ) -> None:
        """``owners``: the request of each vector of ``pooled``. ``timing``: of a timed stream."""
        self._req_ids = req_ids
        self._launched = launched
        self._owners = owners
        self._pooled = pooled
        self._timing = timing

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._launched.done()

    def result(self) -> ModelRunnerOutput:
        """The one wait for the device. Raises RuntimeError if an op failed."""
        self._launched.wait()
        tokens: dict[str, list[int]] = {request_id: [] for request_id in self._req_ids}
        output = ModelRunnerOutput(req_ids=self._req_ids, sampled_token_ids=list(tokens.values()))
        if self._owners:
            vectors = self._pooled.numpy()
            finite = np.isfinite(vectors).all(axis=1).tolist()
            for number, request_id in enumerate(self._owners):
                tokens[request_id].append(DONE_TOKEN)
                output.pooled[request_id] = vectors[number].tobytes()
                if not finite[number]:
                    output.failed_req_ids[request_id] = "its embedding has NaN or infinite numbers"
        if self._timing is not None:
            output.device_spans = self._launched.spans(self._timing.names)
            output.graph_mode = self._timing.graph_mode
        return output
