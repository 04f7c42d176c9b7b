"""``twostep complete MODEL PROMPT``: continue a text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from twostep.contracts.errors import TwostepError, UsageError
from twostep.contracts.results import CompletionOutput, Logprob, RequestOutput
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.chat import closing, end_answer, raise_failure, show
from twostep.entrypoints.cli.engine import Answer, Engine, MakeEngine, load, make_llm
from twostep.entrypoints.cli.structured import (
    add_structured_flags,
    say_if_cut,
    structured_outputs,
)
from twostep.entrypoints.progress import reporter_for
from twostep.entrypoints.resolve import default_sampling, resolve

DEFAULT_MAX_TOKENS = 128
LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

DESCRIPTION = """\
Continue PROMPT as plain text, without a chat template. Without PROMPT, standard input is it.

  twostep complete smollm2-135m "Once upon a" --max-tokens 32
  twostep complete model.gguf "2 + 2 =" --temperature 0 --logprobs 3 --json
  twostep complete model.gguf "A person as JSON: " --json-schema person.json
"""


def run(
    argv: list[str],
    make: MakeEngine = make_llm,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run the command; returns the exit code. The callables are for tests."""
    parser = cli_args.Parser("twostep complete", "MODEL [PROMPT]", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompt", nargs="?", type=cli_args.utf8, metavar="PROMPT")
    parser.add_argument(
        "-n", type=cli_args.positive_size, default=1, help="completions (default 1)"
    )
    parser.add_argument("--logprobs", type=int, metavar="K", help="log-probabilities of the top K")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the boot table")
    cli_args.add_sampling_flags(parser, max_tokens=str(DEFAULT_MAX_TOKENS))
    add_structured_flags(parser)
    cli_args.add_engine_flags(parser)
    args = parser.parse(argv)

    prompt = args.prompt
    if prompt is None:
        if console.stdin_is_terminal():
            raise UsageError("no PROMPT: give it as an argument or on standard input")
        prompt = console.read_piped_prompt()
    cli_args.check_watch_flags(args)
    form = structured_outputs(args)
    model = resolve(args.model, reporter_for())
    params = cli_args.sampling_params(args, default_sampling(model), DEFAULT_MAX_TOKENS)
    params.n = args.n
    params.logprobs = args.logprobs
    params.structured_outputs = form
    with load(make, model, cli_args.options_for_one(args, model), verbose=args.verbose) as engine:
        if args.json or args.n > 1 or args.logprobs is not None:
            return complete_at_once(engine, args.model, prompt, params, as_json=args.json)
        return complete_streaming(engine, prompt, params, clock)


def complete_streaming(
    engine: Engine, prompt: str, params: SamplingParams, clock: Callable[[], float]
) -> int:
    """Print the text as it comes: 0, or 130 if it was interrupted."""
    answer = Answer(started=clock())
    stream = engine.stream(prompt, params)
    with console.interruptible() as interrupted, closing(stream):
        for output in stream:
            show(answer.add(output, clock()))
            if interrupted.is_set:
                answer.finish_reason = answer.finish_reason or "abort"
                break
    raise_failure(answer)
    end_answer(answer)
    say_if_cut(params, answer.finish_reason)
    return 130 if answer.finish_reason == "abort" else 0


def complete_at_once(
    engine: Engine, name: str, prompt: str, params: SamplingParams, *, as_json: bool
) -> int:
    """Print all completions when all have ended."""
    [output] = engine.generate([prompt], params, use_tqdm=False)
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise TwostepError(f"the model failed on this prompt: {completion.stop_reason}")
        say_if_cut(params, completion.finish_reason)
    if as_json:
        console.print_json(document(name, output))
        return 0
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(console.dim(f"[{completion.index}]", sys.stdout))
        print(completion.text)
        if completion.logprobs is not None:
            print(console.table(logprob_rows(completion.token_ids, completion.logprobs)))
    return 0


def document(name: str, output: RequestOutput) -> dict[str, Any]:
    """The JSON document of a completion."""
    return {
        "model": name,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "choices": [choice(completion) for completion in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "completion_tokens": sum(len(c.token_ids) for c in output.outputs),
        },
    }


def choice(completion: CompletionOutput) -> dict[str, Any]:
    """One completion, for JSON."""
    logprobs = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": finite(completion.cumulative_logprob),
        "logprobs": None
        if logprobs is None
        else [
            position(token, found)
            for token, found in zip(completion.token_ids, logprobs, strict=True)
        ],
    }


def position(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
    """The chosen token of one position, and the likeliest ones."""
    return {
        **entry(token_id, found[token_id]),
        "top": [entry(other, logprob) for other, logprob in by_rank(found)],
    }


def entry(token_id: int, found: Logprob) -> dict[str, Any]:
    """One token with its log-probability."""
    return {
        "token_id": token_id,
        "token": found.decoded_token,
        "logprob": finite(found.logprob),
        "rank": found.rank,
    }


def by_rank(found: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Tokens of one position, likeliest first."""
    return sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))


def finite(logprob: float | None) -> float | None:
    """A log-probability that JSON can hold."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def logprob_rows(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
) -> list[list[str]]:
    """A table for people: token, log-probability, the likeliest tokens."""
    rows = [["token", "logprob", "likeliest"]]
    for token_id, found in zip(token_ids, logprobs, strict=True):
        chosen = found[token_id]
        likeliest = "  ".join(f"{e.decoded_token!r} {e.logprob:.3f}" for _, e in by_rank(found))
        rows.append([repr(chosen.decoded_token), f"{chosen.logprob:.3f}", likeliest])
    return rows
