"""The tour on a real model as one JSON document."""

from __future__ import annotations

from typing import Any

import msgspec.structs

from twostep.entrypoints.tour import facts
from twostep.entrypoints.tour.document import journey_document
from twostep.entrypoints.tour.live import LiveTour, lanes_of_call, overlap_of_call
from twostep.entrypoints.tour.stops import all_stops


def live_document(tour: LiveTour) -> dict[str, Any]:
    """Everything that ``twostep tour --live`` shows."""
    journey = tour.journey
    return {
        "config": tour.config,
        **journey_document(journey),
        "time": {
            "lanes_of_call_k_ms": [msgspec.structs.asdict(span) for span in lanes_of_call(journey)],
            "overlap_of_call_k": overlap_of_call(journey.calls[0]),
            "host_us_measured": facts.host_lane(journey.calls[0]),
            "steady_decode": tour.steady,
        },
        "stops": [stop.document() for stop in all_stops(journey)],
    }
