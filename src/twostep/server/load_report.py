"""How loaded the engine is, on the answer itself, for balancers that ask for it (ORCA's header).

Envoy's load reports: the request names a format, the answer carries the figures, so that whoever
balances need not scrape /metrics.
"""

from __future__ import annotations

import msgspec

from twostep.server.http import HttpCall
from twostep.server.observability import Observability

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def load_report(call: HttpCall, observability: Observability) -> dict[str, str]:
    """The header that a request asked for by ``endpoint-load-metrics-format: TEXT`` or ``JSON``.

    Empty if it did not ask, asked for another format, or nothing is known yet.
    """
    wanted = (call.header(REQUEST_HEADER) or "").strip().upper()
    engine = observability.engine
    if wanted not in ("TEXT", "JSON") or engine is None:
        return {}
    figures = {
        "kv_cache_usage_perc": engine.kv_cache_usage,
        "num_requests_waiting": engine.num_requests_waiting,
    }
    if wanted == "JSON":
        report = msgspec.json.encode({"named_metrics": figures}).decode()
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
    return {RESPONSE_HEADER: f"{wanted} {report}"}
