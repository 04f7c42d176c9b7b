"""``twostep run-batch``: a file of requests in, a file of answers out, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from twostep.contracts.errors import UsageError
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import serve
from twostep.entrypoints.cli.serve_flags import add_server_flags
from twostep.entrypoints.progress import reporter_for

if TYPE_CHECKING:
    from twostep.entrypoints.batch import BatchLine

DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format, one JSON object a line:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

  twostep run-batch -i requests.jsonl -o answers.jsonl --model smollm2-135m
"""
SEQUENCES_AHEAD = 2
"""Requests under way for each that can run at once, so that the engine never waits for one."""


def make_parser() -> cli_args.Parser:
    """The engine's flags, and those of ``serve`` that say what answers look like."""
    parser = cli_args.Parser("twostep run-batch", "-i FILE -o FILE", DESCRIPTION)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    add_server_flags(parser)
    cli_args.add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Run the command; 0 if every request was answered, 1 if one failed."""
    import asyncio

    from twostep.entrypoints.batch import read_batch

    args = make_parser().parse(argv)
    name = serve.model_name(args)
    serve.check_parsers(args)
    lines = read_batch(args.input_file)
    try:
        output = args.output_file.open("wb")
    except OSError as error:
        raise UsageError(f"cannot write {args.output_file}: {error.strerror}") from error
    with output:
        num_failed = asyncio.run(answer(args, name, lines, output))
    told = f"{len(lines) - num_failed} answered, {num_failed} failed: {args.output_file}"
    print(told, file=sys.stderr)
    return 1 if num_failed else 0


async def answer(
    args: argparse.Namespace, name: str, lines: list[BatchLine], output: BinaryIO
) -> int:
    """Load the model, answer, write results in the order of the lines; returns failures."""
    from twostep.entrypoints.batch import answer_batch, encode_result
    from twostep.server.app import build_app
    from twostep.server.state import ServerState

    state = ServerState(serve.server_settings(args, name))
    state.default_chat_template_kwargs = args.default_chat_template_kwargs or {}
    engine = await serve.load_engine(args, name, state)
    num_failed = 0
    async with engine:
        with reporter_for().count("requests", len(lines), "req") as on_done:
            results = answer_batch(
                build_app(state),
                lines,
                concurrency=SEQUENCES_AHEAD * engine.info.max_num_seqs,
                on_done=on_done,
            )
            async for result in results:
                output.write(encode_result(result))
                output.flush()
                num_failed += result.error is not None
        await state.observability.close()
    return num_failed
