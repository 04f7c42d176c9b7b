"""``twostep chat``: one answer, or a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, cast

from twostep.contracts.errors import ModelNotFoundError, TwostepError, UsageError
from twostep.contracts.sampling import SamplingParams
from twostep.entrypoints import catalogue
from twostep.entrypoints.catalogue import DEFAULT_MODEL
from twostep.entrypoints.cli import args as cli_args
from twostep.entrypoints.cli import console
from twostep.entrypoints.cli.engine import Answer, Engine, MakeEngine, Message, load, make_llm
from twostep.entrypoints.cli.structured import (
    add_structured_flags,
    say_if_cut,
    structured_outputs,
)
from twostep.entrypoints.progress import reporter_for
from twostep.entrypoints.resolve import default_sampling, looks_like_model, resolve, unknown

DESCRIPTION = f"""\
Talk to a model. Without PROMPT: a conversation on a terminal, else standard input is the prompt.

  twostep chat "What is the capital of France?"
  twostep chat gemma3-270m
  cat notes.txt | twostep chat --system "Summarise in three lines."

MODEL defaults to {DEFAULT_MODEL}. A single word that names a model is taken as MODEL.
"""

HELP = """\
/reset        forget the conversation (the system text stays)
/system TEXT  set the system text and forget the conversation; without TEXT show it
/help         this text
/exit         leave (also Ctrl-D)
Ctrl-C stops an answer; pressed twice at the prompt it leaves."""


def run(
    argv: list[str],
    make: MakeEngine = make_llm,
    read_line: Callable[[str], str] = input,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run the command; returns the exit code. The callables are for tests."""
    parser = cli_args.Parser("twostep chat", "[MODEL] [PROMPT]", DESCRIPTION)
    parser.add_argument("words", nargs="*", type=cli_args.utf8, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--model", help="the model, when PROMPT could be taken for one")
    parser.add_argument("-s", "--system", type=cli_args.utf8, metavar="TEXT", help="system text")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the boot table")
    cli_args.add_sampling_flags(parser, max_tokens="the rest of the context")
    add_structured_flags(parser)
    cli_args.add_engine_flags(parser)
    args = parser.parse(argv)

    name, prompt = split_words(args.words, args.model)
    is_interactive = prompt is None and console.stdin_is_terminal()
    if is_interactive and args.json:
        raise UsageError("--json needs a PROMPT, as an argument or on standard input")
    if prompt is None and not is_interactive:
        prompt = console.read_piped_prompt()

    cli_args.check_watch_flags(args)
    form = structured_outputs(args)
    model = resolve(name, reporter_for())
    params = cli_args.sampling_params(args, default_sampling(model), max_tokens=None)
    params.structured_outputs = form
    options = cli_args.options_for_one(args, model)
    options["max_num_seqs"] = options["max_num_seqs"] or 1  # one conversation: room for no more
    with load(make, model, options, verbose=args.verbose or is_interactive) as engine:
        conversation = Conversation(engine, params, args.system, clock)
        if prompt is None:
            return converse(conversation, name, read_line)
        return answer_once(conversation, name, prompt, as_json=args.json)


def split_words(words: list[str], model: str | None) -> tuple[str, str | None]:
    """(model, prompt) from the positional arguments and ``--model``."""
    if len(words) > (1 if model else 2):
        raise UsageError("too many arguments: put the prompt in quotes")
    if model is not None:
        return model, words[0] if words else None
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return DEFAULT_MODEL, None
    [word] = words
    if looks_like_model(word):
        return word, None
    is_slip = not any(c.isspace() for c in word) and "-" in word and catalogue.near_names(word)
    if is_slip:
        raise ModelNotFoundError(f"{unknown(word)}; if it is the prompt, add --model NAME")
    return DEFAULT_MODEL, word


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        system: str | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self.params = params
        self._clock = clock
        self.system = system
        self.messages: list[Message] = []

    def reset(self) -> None:
        """Forget all but the system text."""
        self.messages = []

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> Answer:
        """Answer ``prompt``, handing on each piece of text; Ctrl-C ends the answer early.

        What was said enters the history only if something came back. A failure leaves the
        history as it was.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        question = {"role": "user", "content": prompt}
        answer = Answer(started=self._clock())
        stream = self._engine.stream_chat([*system, *self.messages, question], self.params.clone())
        with console.interruptible() as interrupted, closing(stream):
            for output in stream:
                on_text(answer.add(output, self._clock()))
                if interrupted.is_set:
                    answer.finish_reason = answer.finish_reason or "abort"
                    break
        if answer.text:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer


def closing(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Closes a stream at the end of the block, which aborts its request if it still runs."""
    if hasattr(stream, "close"):
        return contextlib.closing(cast("Generator[Any]", stream))
    return contextlib.nullcontext()


def answer_once(conversation: Conversation, name: str, prompt: str, *, as_json: bool) -> int:
    """Answer one prompt and end: 0, or 130 if it was interrupted."""
    answer = conversation.ask(prompt, (lambda text: None) if as_json else show)
    raise_failure(answer)
    if as_json:
        console.print_json(
            {
                "model": name,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "usage": answer.usage(),
                "ttft_s": answer.ttft,
                "tokens_per_s": answer.tokens_per_second,
            }
        )
    else:
        end_answer(answer)
    say_if_cut(conversation.params, answer.finish_reason)
    return 130 if answer.finish_reason == "abort" else 0


def converse(conversation: Conversation, name: str, read_line: Callable[[str], str]) -> int:
    """Ask and answer until the person leaves: 0 after /exit or Ctrl-D, 130 after two Ctrl-C."""
    if read_line is input:
        enable_line_editing()
    print(console.dim(f"{name} · /help for help, Ctrl-D to leave", sys.stderr), file=sys.stderr)
    interrupts = 0
    while interrupts < 2:
        try:
            line = read_line("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            interrupts += 1
            print("\n(Ctrl-C again or Ctrl-D to leave)" if interrupts == 1 else "")
            continue
        interrupts = 0
        if line in ("/exit", "/quit", "/bye"):
            return 0
        if line.startswith("/"):
            print(obey(conversation, line), file=sys.stderr)
        elif line:
            ask_and_show(conversation, line)
    return 130


def enable_line_editing() -> None:
    """Arrow keys and recall of earlier lines, where Python was built with readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what switches it on


def obey(conversation: Conversation, line: str) -> str:
    """Carry out a ``/`` command; returns what to tell the person."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/reset":
        conversation.reset()
        return "forgotten"
    if command == "/system" and rest:
        conversation.system = rest
        conversation.reset()
        return "system text set; conversation forgotten"
    if command == "/system":
        return conversation.system or "no system text"
    if command == "/help":
        return HELP
    return f"unknown command {command}; /help lists them"


def ask_and_show(conversation: Conversation, prompt: str) -> None:
    """One turn; an error ends the turn, not the program."""
    try:
        cli_args.utf8(prompt)
        answer = conversation.ask(prompt, show)
        raise_failure(answer)
        end_answer(answer)
        say_if_cut(conversation.params, answer.finish_reason)
    except (TwostepError, argparse.ArgumentTypeError) as error:
        print(f"twostep: error: {error}", file=sys.stderr)


def show(text: str) -> None:
    """Print a piece of an answer at once."""
    print(text, end="", flush=True)


def end_answer(answer: Answer) -> None:
    """End the line and, on a terminal, say how fast it was."""
    print(flush=True)
    if sys.stdout.isatty() and sys.stderr.isatty():
        print(console.dim(answer.figures(), sys.stderr), file=sys.stderr)


def raise_failure(answer: Answer) -> None:
    """Raise if the engine ended the answer by an error."""
    if answer.finish_reason == "error":
        raise TwostepError(f"the model failed on this prompt: {answer.stop_reason or 'no reason'}")
