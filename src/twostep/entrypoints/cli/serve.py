"""``twostep serve [MODEL]``: an HTTP server that speaks OpenAI's protocol."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec.structs

from twostep.contracts.errors import UsageError
from twostep.entrypoints.catalogue import DEFAULT_MODEL
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli.config_file import parse_with_config
from twostep.entrypoints.cli.help_pages import show_help
from twostep.entrypoints.cli.serve_flags import add_server_flags

if TYPE_CHECKING:
    import ssl

    from twostep.contracts.sampling import SamplingParams
    from twostep.entrypoints.early_core import EarlyCore
    from twostep.entrypoints.engine_options import EngineOptions
    from twostep.frontend.async_llm import AsyncLLM
    from twostep.server.launcher import Server
    from twostep.server.middleware.custom import Middleware
    from twostep.server.settings import ServerSettings
    from twostep.server.state import ServerState

DESCRIPTION = """\
Serve MODEL (default smollm2-135m) to every client that speaks OpenAI's protocol.

  twostep serve
  twostep serve model.gguf --port 8080 --api-key SECRET
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""


def make_parser() -> cli_args.Parser:
    """The command's flags; building it imports nothing heavy."""
    parser = cli_args.Parser("twostep serve", "[MODEL]", DESCRIPTION)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    add_server_flags(parser)
    cli_args.add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Run the command; returns the exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 on failure."""
    if show_help(make_parser(), argv):
        return 0
    args = parse_with_config(make_parser, argv)
    name = model_name(args)
    cli_args.check_watch_flags(args)
    with contextlib.closing(begin_core(args, name)) as core:
        settings = server_settings(args, name)
        check_parsers(args)
        default_params(None, args.override_generation_config)
        check_observability(args)
        tls_of(args)
        middleware_of(args)
        return serve(args, name, settings, core)


def model_name(args: argparse.Namespace) -> str:
    """The model, from the operand or --model."""
    words: list[str] = [*args.words, *([args.model] if args.model else [])]
    if len(words) > 1:
        raise UsageError(f"one MODEL, not {len(words)}: {' '.join(words)}")
    return words[0] if words else DEFAULT_MODEL


def begin_core(args: argparse.Namespace, name: str) -> EarlyCore:
    """Start the engine core of a model that is on disk: it loads while the server's modules do."""
    from twostep.entrypoints.async_engine import start_core_process
    from twostep.entrypoints.early_core import EarlyCore
    from twostep.entrypoints.resolve import find_on_disk

    model = find_on_disk(name)
    if model is None:
        return EarlyCore()
    options, _ = core_options(args)
    return EarlyCore(start_core_process(model, options))


def core_options(args: argparse.Namespace) -> tuple[EngineOptions, str | None]:
    """What the flags say of the engine, and the chat template that replaces the model's own."""
    from twostep.entrypoints.engine_options import EngineOptions

    options = cli_args.engine_options(args)
    template = options.pop("chat_template", None)
    return EngineOptions(**options), template


def server_settings(args: argparse.Namespace, name: str) -> ServerSettings:
    """The server's settings from the flags and TWOSTEP_API_KEY."""
    from twostep.server.app import loopback_hosts
    from twostep.server.settings import ServerSettings

    keys = [key for group in args.api_key or [] for key in group]
    if not keys and (from_environment := os.environ.get("TWOSTEP_API_KEY")):
        keys = [from_environment]
    if "" in keys:
        raise UsageError("--api-key is empty: give a key, or leave the flag out")
    is_local = args.uds is None and args.host in ("localhost", "127.0.0.1", "::1")
    hosts = None
    if is_local or args.allowed_hosts:
        hosts = (*loopback_hosts(), *(args.allowed_hosts or []))
    return ServerSettings(
        served_model_names=tuple(args.served_model_name or [default_served_name(name)]),
        model_name_policy=args.model_name_policy,
        api_keys=tuple(keys),
        allowed_hosts=hosts,
        allowed_origins=tuple(args.allowed_origins or ()),
        root_path=args.root_path.rstrip("/"),
        middleware=tuple(args.middleware),
        max_request_bytes=args.max_request_bytes,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        request_timeout=args.request_timeout or None,
        shutdown_timeout=args.shutdown_timeout,
        max_core_restarts=args.restart_core,
        sse_keep_alive_interval=args.sse_keep_alive_interval,
        trust_request_chat_template=args.trust_request_chat_template,
        enable_log_requests=args.enable_log_requests,
        ui=args.ui,
        disable_access_log=args.disable_uvicorn_access_log,
        metrics_compat=args.metrics_compat,
        custom_histogram_buckets=args.custom_histogram_buckets,
        log_stats_interval=0.0 if args.disable_log_stats else 10.0,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
    )


def default_served_name(model: str) -> str:
    """The name under which clients ask for a model: never a path of this machine."""
    from twostep.entrypoints.resolve import looks_like_path

    return Path(model).name if looks_like_path(model) or Path(model).exists() else model


def check_parsers(args: argparse.Namespace) -> None:
    """Raise UsageError for a parser that there is not, before anything is loaded."""
    from twostep.server.parsers.formats import choose_formats

    choose_formats(
        None, tool_call_parser=args.tool_call_parser, reasoning_parser=args.reasoning_parser
    )


def check_observability(args: argparse.Namespace) -> None:
    """Raise UsageError for buckets or traces that cannot be, before anything is loaded."""
    from twostep.metrics.buckets import make_buckets

    make_buckets(1, args.custom_histogram_buckets)
    if args.otlp_traces_endpoint is not None:
        from twostep.metrics.tracing import make_exporter

        make_exporter(args.otlp_traces_endpoint)


def tls_of(args: argparse.Namespace) -> ssl.SSLContext | None:
    """The context of --ssl-certfile; None without. UsageError for files that do not fit."""
    if args.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} needs --ssl-certfile; give it")
        return None
    from twostep.server.tls import tls_context

    return tls_context(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)


def middleware_of(args: argparse.Namespace) -> tuple[Middleware, ...]:
    """What --middleware names. UsageError for what is not there, or no middleware."""
    if not args.middleware:
        return ()
    from twostep.server.middleware.custom import load_middleware

    return tuple(map(load_middleware, args.middleware))


def serve(args: argparse.Namespace, name: str, settings: ServerSettings, core: EarlyCore) -> int:
    """Listen, load, serve until the end."""
    import asyncio

    import uvloop

    from twostep.server.launcher import Server, listen, raise_file_limit, url_of
    from twostep.server.logs import set_up_logging

    started = time.monotonic()
    set_up_logging(args.log_format, args.log_level)
    raise_file_limit()
    sock = listen(args.host, args.port, args.uds)
    tls, middleware = tls_of(args), middleware_of(args)
    url = url_of(sock, tls) + settings.root_path

    async def main() -> Server:
        from twostep.server.app import build_app, build_shedder
        from twostep.server.state import ServerState

        state = ServerState(settings)
        state.default_chat_template_kwargs = args.default_chat_template_kwargs or {}

        async def load() -> AsyncLLM:
            engine = await load_engine(args, name, state, core)
            announce(url, settings, engine, time.monotonic() - started)
            return engine

        app, shedder = build_app(state, middleware=middleware), build_shedder(state, middleware)
        server = Server(app, state, sock, load, tls, shedder)
        server.handle_signals(asyncio.get_running_loop())
        return await _run(server)

    print(f"twostep: loading {name}; {url} answers 503 until it is ready", file=sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            server = runner.run(main())
    finally:
        if args.uds is not None:
            Path(args.uds).unlink(missing_ok=True)
    return 130 if server.interrupted else 0


async def _run(server: Server) -> Server:
    await server.run()
    return server


async def load_engine(
    args: argparse.Namespace, name: str, state: ServerState, core: EarlyCore | None = None
) -> AsyncLLM:
    """Find the model, start its engine unless ``core`` has one, and open the server."""
    import asyncio
    import importlib

    # In a thread: until the modules are there, the server answers that it is loading.
    await asyncio.to_thread(importlib.import_module, "twostep.entrypoints.async_engine")
    from twostep.entrypoints.async_engine import ProgressReporter, start_async_llm
    from twostep.entrypoints.cli.engine import phases
    from twostep.entrypoints.resolve import default_sampling, resolve
    from twostep.server.parsers.formats import choose_formats

    loop = asyncio.get_running_loop()
    with phases() as show:

        def on_progress(phase: str, fraction: float) -> None:
            state.loading(phase, fraction)
            show(phase, fraction)

        def from_thread(phase: str, fraction: float) -> None:
            loop.call_soon_threadsafe(on_progress, phase, fraction)

        model = await asyncio.to_thread(resolve, name, ProgressReporter(from_thread))
        options, template = core_options(args)
        if state.status == "restarting":  # the files show how the first core died: keep them
            options = msgspec.structs.replace(options, trace=None, record=None)
        recommended = None if args.generation_config == "vllm" else default_sampling(model)
        defaults = default_params(recommended, args.override_generation_config)
        engine = await start_async_llm(
            name,
            options,
            chat_template=template,
            reject_long_max_tokens=args.max_tokens_policy == "reject",
            on_progress=on_progress,
            process=core.take() if core else None,
        )
    formats = choose_formats(
        template or engine.tokenizer.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    state.ready(engine, defaults, formats)
    return engine


def default_params(recommended: Any, override: dict[str, Any] | None) -> SamplingParams:
    """What requests without parameters get: the model's authors' advice, then the flag's.

    Raises UsageError for a name or value that is none.
    """
    import msgspec

    from twostep.contracts.sampling import SamplingParams

    params = SamplingParams()
    if recommended is not None:
        for name in ("temperature", "top_p", "top_k"):
            setattr(params, name, getattr(recommended, name))
    known = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    known |= {"presence_penalty", "frequency_penalty"}
    if unknown := sorted(set(override or {}) - known):
        raise UsageError(
            f"--override-generation-config sets {unknown[0]!r}; "
            f"it may set {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert(
            {**msgspec.structs.asdict(params), **(override or {})}, SamplingParams
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"--override-generation-config: {error}") from None


def announce(url: str, settings: ServerSettings, engine: AsyncLLM, seconds: float) -> None:
    """Say what was loaded, and that requests are taken."""
    from twostep.entrypoints.cli.console import dim, table

    print(dim(table(engine.info.boot), sys.stderr), file=sys.stderr)
    print(f"twostep: ready on {url} in {seconds:.1f} s", file=sys.stderr)
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    path = "/v1/chat/completions"
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    if engine.info.pooler is not None:
        path, body = "/v1/embeddings", '{"input": "Hello"}'
    target = f"{url}{path}"
    if url.startswith("unix:"):
        target = f"--unix-socket {url.removeprefix('unix:')} http://localhost{path}"
    example = f"  curl {target} -H 'Content-Type: application/json'{key} -d '{body}'"
    print(dim(example, sys.stderr), file=sys.stderr, flush=True)
