"""The whole tour as one JSON document."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.journey import A, B, Journey
from twostep.entrypoints.tour.questions import all_questions
from twostep.entrypoints.tour.stops import all_stops


def tour_document(journey: Journey) -> dict[str, Any]:
    """Everything that ``twostep tour`` shows, and the flat batch in full."""
    return {
        "config": facts.config_document(journey),
        **journey_document(journey),
        "time": {
            "device_ms": facts.device_lane(journey),
            "host_us_measured": facts.host_lane(journey.calls[0]),
        },
        "questions": [msgspec.to_builtins(question) for question in all_questions(journey)],
        "stops": [stop.document() for stop in all_stops(journey)],
    }


def journey_document(journey: Journey) -> dict[str, Any]:
    """What every engine can tell of the two requests."""
    call = journey.calls[0]
    return {
        "requests": requests_document(journey),
        "counters": facts.counter_table(journey),
        "scheduler_output": facts.plain(journey.plan(0)),
        "batch": facts.batch_document(
            call.launch, journey.core.scheduler.kv_cache_manager.block_size
        ),
        "graph_mode": facts.graph_modes(journey),
        "num_sampled": call.launch.batch.num_sampled,
        "model_runner_output": facts.result_document(call.result),
        "outputs": facts.outputs_document(call),
        "scheduler_stats": facts.stats_document(call),
        "budget_left_k_plus_1": facts.budget_left(journey, 1),
    }


def requests_document(journey: Journey) -> dict[str, dict[str, Any]]:
    """The two requests right before call k."""
    found = {}
    for request_id in (B, A):
        now = journey.calls[0].started.requests[request_id]
        found[request_id] = {
            "num_prompt_tokens": now.num_prompt_tokens,
            "num_output_tokens": now.num_tokens - now.num_prompt_tokens,
            "num_computed_tokens": now.num_computed_tokens,
            "num_output_placeholders": now.num_output_placeholders,
            "is_prefill_chunk": now.is_prefill_chunk,
        }
    return found
