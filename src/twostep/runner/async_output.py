"""The result of a step that may still be running."""

from __future__ import annotations

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.ops.cpu.device_model import SAMPLE, SampledRows


class LaunchTiming(msgspec.Struct, frozen=True):
    """What is to be told of a step's launches."""

    names: dict[int, str]
    """{ticket: "forward", "logits" or "sample"}"""
    graph_mode: str


class AsyncOutput:
    """A ``StepFuture``: waits for the device, then turns device rows into the step's result."""

    def __init__(
        self,
        req_ids: list[str],
        sampled: SampledRows,
        owners: list[str],
        kinds: list[int],
        *,
        with_logprobs: bool,
        slice_rows: int,
        timing: LaunchTiming | None = None,
    ) -> None:
        """``owners`` and ``kinds``: the request and the kind (SAMPLE, SCORE) of each logits row.

        ``timing``: if the stream times its launches.
        """
        self._req_ids = req_ids
        self._sampled = sampled
        self._owners = owners
        self._kinds = kinds
        self._with_logprobs = with_logprobs
        self._slice_rows = slice_rows
        self._timing = timing

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._sampled.done()

    def result(self) -> ModelRunnerOutput:
        """The one wait for the device. Raises RuntimeError if an op failed."""
        self._sampled.wait()
        tokens: dict[str, list[int]] = {request_id: [] for request_id in self._req_ids}
        for request_id, token in zip(self._owners, self._sampled.tokens(), strict=True):
            if token >= 0:
                tokens[request_id].append(token)
        output = ModelRunnerOutput(req_ids=self._req_ids, sampled_token_ids=list(tokens.values()))
        for row, why in self._sampled.failed(self._slice_rows):
            output.failed_req_ids[self._owners[row]] = why
        if self._with_logprobs:
            self._collect_logprobs(output)
        if self._timing is not None:
            output.device_spans = self._sampled.spans(self._timing.names)
            output.graph_mode = self._timing.graph_mode
        return output

    def _collect_logprobs(self, output: ModelRunnerOutput) -> None:
        for row, (request_id, kind) in enumerate(zip(self._owners, self._kinds, strict=True)):
            found = self._sampled.logprobs(row, self._slice_rows)
            if found is not None:
                ids, values, rank = found
                store = output.logprobs if kind == SAMPLE else output.prompt_logprobs
                entry = TokenLogprobs(ids.tolist(), values.tolist(), rank)
                store.setdefault(request_id, []).append(entry)


class CompletedOutput:
    """A ``StepFuture`` that has its result already."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> ModelRunnerOutput:
        """The output."""
        return self._output
