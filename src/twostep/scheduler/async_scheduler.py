"""Planning step k while step k-1 runs: tokens on their way are counted as placeholders."""

from __future__ import annotations

from twostep.contracts.plan import SchedulerOutput
from twostep.scheduler.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A scheduler whose plans may be queued behind a step that has not returned.

    ``update_from_output`` takes one placeholder away for each token that comes back.
    At any rest point a decoding request has
    ``num_computed_tokens - num_output_placeholders == num_tokens - 1``.
    """

    num_steps_in_flight = 2

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        requests = self.requests
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_spec_tokens = self.num_spec_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            request = requests[request_id]
            if request.is_prefill_chunk:
                continue
            request.num_output_placeholders += 1
            if num_spec_tokens:
                request.num_output_placeholders += len(drafts.get(request_id, ()))
                # The draft ids are known on the device only.
                request.spec_token_ids = [-1] * num_spec_tokens
