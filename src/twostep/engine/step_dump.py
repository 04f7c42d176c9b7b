"""A failed step in words: ids and counts, never text or tokens of a prompt."""

from __future__ import annotations

from twostep.contracts.plan import SchedulerOutput
from twostep.scheduler.scheduler import Scheduler


def describe_step(plan: SchedulerOutput, scheduler: Scheduler) -> str:
    """One line for the log."""
    new = {
        request.request_id: (request.num_computed_tokens, len(request.block_ids))
        for request in plan.scheduled_new_reqs
    }
    pool = scheduler.kv_cache_manager.pool
    return (
        f"step {plan.step_id} failed: tokens {plan.num_scheduled_tokens}, "
        f"total {plan.total_num_scheduled_tokens}, "
        f"new (computed tokens, blocks) {new}, "
        f"finished {sorted(plan.finished_req_ids)}, preempted {sorted(plan.preempted_req_ids)}; "
        f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}, "
        f"free blocks {pool.num_free_blocks} of {pool.num_usable_blocks}"
    )
