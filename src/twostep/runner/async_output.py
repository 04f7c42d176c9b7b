"""The result of a step that may still be running."""

from __future__ import annotations

from twostep.contracts.outputs import ModelRunnerOutput, TokenLogprobs
from twostep.ops.cpu.device_model import SAMPLE, SampledRows


class AsyncOutput:
    """A ``StepFuture``: waits for the device, then turns device rows into the step's result.

    ``owners`` names the request and kind (SAMPLE or SCORE) of each logits row, in row order.
    """

    def __init__(
        self,
        req_ids: list[str],
        sampled: SampledRows,
        owners: list[tuple[str, int]],
        with_logprobs: list[bool],
    ) -> None:
        self._req_ids = req_ids
        self._sampled = sampled
        self._owners = owners
        self._with_logprobs = with_logprobs

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._sampled.done()

    def result(self) -> ModelRunnerOutput:
        """The one wait for the device. Raises RuntimeError if an op failed."""
        self._sampled.wait()
        tokens: dict[str, list[int]] = {request_id: [] for request_id in self._req_ids}
        output = ModelRunnerOutput(req_ids=self._req_ids, sampled_token_ids=[])
        flags = self._sampled.failed()
        for index, (token, (request_id, kind)) in enumerate(
            zip(self._sampled.tokens(), self._owners, strict=True)
        ):
            if flags[index]:
                output.failed_req_ids[request_id] = (
                    "the model's logits hold NaN or Inf, or no token was left to choose"
                )
                continue
            if kind == SAMPLE:
                tokens[request_id].append(token)
            if self._with_logprobs[index]:
                store = output.logprobs if kind == SAMPLE else output.prompt_logprobs
                ids, values, rank = self._sampled.logprobs(index)
                store.setdefault(request_id, []).append(TokenLogprobs(ids, values, rank))
        output.sampled_token_ids = list(tokens.values())
        return output


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
