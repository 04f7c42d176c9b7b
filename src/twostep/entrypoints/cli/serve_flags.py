"""The flags of ``twostep serve`` that are the server's own, spelled as vLLM spells them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from twostep.entrypoints.cli.args import positive_size, size


def seconds(text: str) -> float:
    """A time of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 or more seconds")
    return value


def port(text: str) -> int:
    """0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535, 0 takes a free one")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def origins(text: str) -> str:
    """An origin such as https://example.com, or *."""
    if text != "*" and "://" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no origin: https://example.com, or *")
    return text.rstrip("/")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, in groups."""
    _add_server(parser.add_argument_group("server"))
    _add_model(parser.add_argument_group("model and answers"))
    _add_limits(parser.add_argument_group("limits"))
    _add_logs(parser.add_argument_group("logs"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=port, default=8000, metavar="N", help="default 8000; 0 takes a free one")
    add("--uds", metavar="PATH", help="listen on a Unix socket instead")
    add(
        "--api-key",
        action="append",
        nargs="+",
        metavar="KEY",
        help="keys that requests need (default: $TWOSTEP_API_KEY, or none)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        type=origins,
        metavar="ORIGIN",
        help="web pages that may call (CORS; default none)",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="further names of this server (checked when it listens on loopback)",
    )
    add("--ssl-certfile", metavar="FILE", help="certificate (PEM): answer over HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="its key (default: in --ssl-certfile)")
    add("--ssl-ca-certs", metavar="FILE", help="clients need a certificate of these authorities")
    add(
        "--middleware",
        action="append",
        default=[],
        metavar="MODULE.NAME",
        help="ASGI middleware of your own around the server (repeatable; the last is outermost)",
    )
    add("--config", metavar="FILE", help="flags in a file, `port: 8080` a line (YAML)")
    add("--root-path", default="", metavar="PATH", help="prefix under which a proxy shows this")


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="the model, instead of the operand")
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests use (default: MODEL); answers carry the first",
    )
    add(
        "--model-name-policy",
        choices=["strict", "any"],
        default="strict",
        help="any: accept every model name (default strict)",
    )
    add(
        "--generation-config",
        choices=["auto", "vllm"],
        default="auto",
        help="sampling defaults: the model's own (auto, default) or neutral ones (vllm)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help='sampling defaults of your own, {"temperature": 0.7}',
    )
    add(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="variables for the chat template",
    )
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="requests may bring a chat template",
    )
    add("--tool-call-parser", metavar="NAME", help="form of tool calls (default: by the template)")
    add("--enable-auto-tool-choice", action="store_true", help="always on; taken for vLLM's sake")
    add("--reasoning-parser", metavar="NAME", help="form of reasoning (default: by the template)")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-num-queued-reqs",
        type=positive_size,
        metavar="N",
        help="requests that may wait to start, others get 503 (default: no bound)",
    )
    add(
        "--max-num-queued-tokens",
        type=positive_size,
        metavar="N",
        help="prompt tokens of those, else 503 (default: no bound)",
    )
    add(
        "--max-tokens-policy",
        choices=["clamp", "reject"],
        default="clamp",
        help="a max_tokens beyond the room left: end there (clamp, default), or 400 (reject)",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds for a whole request, else 504 (default 0: no bound)",
    )
    add(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM (default 30)",
    )
    add(
        "--restart-core",
        type=size,
        default=5,
        metavar="N",
        help="start an engine core that died again, N times in 10 minutes (default 5, 0: end)",
    )
    add(
        "--max-request-bytes",
        type=positive_size,
        default=32 << 20,
        metavar="SIZE",
        help="largest body, else 413 (default 32M)",
    )
    add(
        "--sse-keep-alive-interval",
        type=seconds,
        default=15.0,
        metavar="S",
        help="seconds of silence before a stream gets a comment (default 15, 0: never)",
    )


def _add_logs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="lines for people (text, default) or JSON documents",
    )
    add(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="default info",
    )
    add("--enable-log-requests", action="store_true", help="log parameters; prompts never")
    add(
        "--disable-log-stats",
        action="store_true",
        help="no line of throughput every 10 s",
    )
    add(
        "--metrics-compat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="old names of vLLM in /metrics as well (default)",
    )
    add(
        "--custom-histogram-buckets",
        metavar="JSON",
        help='bounds of histograms in /metrics, {"time_to_first_token": [0.1, 1]}',
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span for each request, http://HOST:4318/v1/traces",
    )
    add("--ui", action=argparse.BooleanOptionalAction, default=True, help="the page at /")
    add("--disable-uvicorn-access-log", action="store_true", help="no line for each request")
