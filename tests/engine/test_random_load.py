"""Whatever the load, every stream equals the one of the request alone."""

from __future__ import annotations

import logging

import pytest
from driver import Driver


@pytest.mark.timeout(300)
@pytest.mark.parametrize("failures", [False, True], ids=["calm", "failing"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_streams_equal_the_request_alone(
    is_async: bool, policy: str, failures: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """16 random configurations of each kind, invariants recomputed after every step."""
    caplog.set_level(logging.CRITICAL)
    seen = {"preemptions": 0, "failed": 0, "transient": 0, "hits": 0, "finished": 0}
    for seed in range(16):
        driver = Driver(seed, is_async=is_async, policy=policy, failures=failures)
        try:
            driver.run(60)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen["failed"] += driver.num_failed_steps
        seen["transient"] += driver.num_transient_failures
        seen["finished"] += sum(s.finish is not None for s in driver.streams.values())
        for plan in driver.ghost.plans:
            seen["preemptions"] += len(plan.preempted_req_ids)
            seen["hits"] += sum(new.num_computed_tokens > 0 for new in plan.scheduled_new_reqs)
    assert seen["finished"] > 150
    assert seen["preemptions"] > 30
    assert seen["hits"] > 30
    if failures:
        assert seen["failed"] > 5
        assert seen["transient"] > 1
