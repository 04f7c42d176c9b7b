"""Planning step k while step k-1 runs: tokens on their way are counted as placeholders."""

from __future__ import annotations

from twostep.contracts.plan import SchedulerOutput
from twostep.scheduler.request import Request
from twostep.scheduler.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A scheduler whose plans may be queued behind a step that has not returned.

    ``update_from_output`` takes one placeholder away for each token that comes back.
    At any rest point a decoding request has
    ``num_computed_tokens - num_output_placeholders == num_tokens - 1``.
    """

    num_steps_in_flight = 2

    def _update_after_schedule(self, plan: SchedulerOutput, requests: list[Request]) -> None:
        super()._update_after_schedule(plan, requests)
        for request in requests:
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1
        if self.num_spec_tokens:
            self._expect_drafts(plan, requests)

    def _expect_drafts(self, plan: SchedulerOutput, requests: list[Request]) -> None:
        """Planned drafts may become tokens, and new ones will follow: on the device only.

        A grammar cannot look at those before they are used, so its request goes without.
        """
        for request in requests:
            if request.is_prefill_chunk or request.use_structured_output:
                continue
            drafts = plan.scheduled_spec_decode_tokens.get(request.request_id, ())
            request.num_output_placeholders += len(drafts)
            request.spec_token_ids = [-1] * self.num_spec_tokens
