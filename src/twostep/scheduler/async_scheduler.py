"""Planning step k while step k-1 runs: tokens on their way are counted as placeholders."""

from __future__ import annotations

from twostep.contracts.plan import SchedulerOutput
from twostep.scheduler.request import Request
from twostep.scheduler.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A scheduler whose plans may be queued behind a step that has not returned.

    At any rest point a decoding request has
    ``num_computed_tokens - num_output_placeholders == num_tokens - 1``.
    """

    num_steps_in_flight = 2

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        requests = self.requests
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests[request_id]
            if request.is_prefill_chunk:
                continue
            request.num_output_placeholders += 1
            if self.num_spec_tokens:
                request.num_output_placeholders += len(drafts.get(request_id, ()))
                # The draft ids are known on the device only.
                request.spec_token_ids = [-1] * self.num_spec_tokens

    def _update_request_with_output(
        self, request: Request, token_ids: list[int], *, is_stale: bool
    ) -> tuple[list[int], bool]:
        token_ids, stopped = super()._update_request_with_output(
            request, token_ids, is_stale=is_stale
        )
        if not is_stale:
            request.num_output_placeholders -= len(token_ids)
            assert request.num_output_placeholders >= 0
        return token_ids, stopped
