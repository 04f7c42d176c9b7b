"""The tour on a simulated device: the real engine core and scheduler, in virtual time."""

from __future__ import annotations

from twostep.contracts.plan import SchedulerOutput
from twostep.engine.client import InprocClient
from twostep.entrypoints.tour.journey import Journey, Situation, travel
from twostep.entrypoints.tour.observer import Launch, TourObserver
from twostep.entrypoints.tracing.watch import Watch
from twostep.sim.build import build_sim_core


def simulate(
    situation: Situation | None = None,
    *,
    device: str = "h100",
    model: str = "llama-3.1-8b",
    max_num_batched_tokens: int | None = None,
    watch: Watch | None = None,
) -> Journey:
    """The seed's example, unless told otherwise; sizes that are None are the device's defaults.

    ``watch``: files that follow the core as well.
    """
    core, executor, clock = build_sim_core(
        model,
        device,
        max_num_batched_tokens=max_num_batched_tokens,
        observe=None if watch is None else watch.begin,
    )

    def look_at_launch(plan: SchedulerOutput) -> Launch:
        step = executor.steps[plan.step_id]
        return Launch(
            batch=step.batch,
            logits_indices=step.logits_indices,
            graph=step.graph,
            step=step,
        )

    observer = TourObserver(clock.monotonic, look_at_launch)
    observer.watch(core)
    vocab_size = executor.cost_model.facts.config.vocab_size
    journey = travel(InprocClient(core), observer, situation or Situation(), vocab_size)
    observer.leave()
    return journey
