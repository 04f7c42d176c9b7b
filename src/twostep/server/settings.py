"""How the server behaves. Every field has a flag of ``twostep serve``."""

from __future__ import annotations

from typing import Literal

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen when the server starts."""

    served_model_names: tuple[str, ...]
    """Names that requests may use; answers carry the first."""
    model_name_policy: Literal["strict", "any"] = "strict"
    """``any`` accepts every name."""
    api_keys: tuple[str, ...] = ()
    """Empty: everybody may call."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names that the Host header may carry; None: any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call (CORS); ``*`` is all."""
    root_path: str = ""
    middleware: tuple[str, ...] = ()
    """Names of the operator's own layers; the last is the outermost."""
    max_request_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    max_headers: int = 256
    max_prompts: int = 1024
    """Prompts of one completion request."""
    max_num_queued_reqs: int | None = None
    """Sequences that may wait for their first token; None: no bound."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of those."""
    request_timeout: float | None = None
    """Seconds for a whole request; None: no bound."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    max_core_restarts: int = 5
    """Times in ten minutes that an engine core that died is started again; 0: the server ends."""
    sse_keep_alive_interval: float = 15.0
    """Seconds of silence before a stream gets a comment; 0: never."""
    stream_stall_timeout: float = 60.0
    """Seconds a client may leave a stream unread before its request is aborted."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own."""
    enable_log_requests: bool = False
    """Log each request's parameters (never its prompt)."""
    disable_access_log: bool = False
    ui: bool = True
    """Whether there is a page at /."""
    metrics_compat: bool = True
    """Whether /metrics tells old names of vLLM as well."""
    custom_histogram_buckets: str | None = None
    """JSON: {name of a kind of figures: [bounds]}; see metrics/buckets.py."""
    log_stats_interval: float = 10.0
    """Seconds between lines of throughput in the log; 0: none."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests go (OTLP); None: there are none."""
