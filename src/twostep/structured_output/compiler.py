"""Compiles constraints off the engine's loop, and keeps what it has compiled."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from twostep.config.limits import Limits
from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.grammar import GrammarFuture
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.structured_output.grammar import LLGuidanceGrammar
from twostep.structured_output.source import GrammarSource, grammar_source, invalid, is_constrained
from twostep.structured_output.thinking import ThinkingFuture
from twostep.structured_output.tokenizer import Vocabulary, build_ll_tokenizer

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

_REASON_CHARS = 400


class LLGuidanceCompiler:
    """A ``GrammarCompiler``. Any thread may use it.

    Nothing is loaded or built before the first constraint comes. Whether one can be kept is
    remembered (least recently used goes first), so it is checked once and a bad one costs nothing
    the second time. Every request gets a grammar compiled for it alone: llguidance's copies share
    the states of their lexer, and so its limits.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        limits: Limits | None = None,
        *,
        num_threads: int = 2,
    ) -> None:
        """``load_vocabulary`` is called once, in a thread of this object."""
        self._load_vocabulary = load_vocabulary
        self._limits = limits or Limits()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="twostep-grammar")
        self._lock = threading.Lock()
        self._known: OrderedDict[GrammarSource, _Known] = OrderedDict()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: tuple[llguidance.LLTokenizer, Vocabulary] | None = None

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> GrammarFuture:
        """Start compiling; does not wait and does not raise."""
        if params.thinking is None:
            return self._compile_text(params, end_token_ids)
        inner: GrammarFuture | None = None
        if is_constrained(params):
            inner = self._compile_text(params, end_token_ids)
        loaded = self._pool.submit(self._ll_tokenizer)
        return ThinkingFuture(inner, params.thinking, lambda: loaded.result()[1], loaded.done)

    def _compile_text(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> CompiledGrammar:
        future: Future[llguidance.LLMatcher]
        try:
            source = grammar_source(params, self._limits)
        except InvalidRequestError as error:
            future = Future()
            future.set_exception(error)
        else:
            future = self._for_one_request(source)
        return CompiledGrammar(future, self._vocabulary, end_token_ids)

    def validate(self, params: StructuredOutputsParams) -> None:
        """Compile, and wait for it. InvalidRequestError says what cannot be kept, and why."""
        if params.thinking is not None and not is_constrained(params):
            return
        seconds = self._limits.max_grammar_compile_seconds
        source = grammar_source(params, self._limits)
        with self._lock:
            verdict = self._look_up(source).verdict
        if not verdict.done():
            self._pool.submit(self._ll_tokenizer).result()  # its time is not the grammar's
        try:
            verdict.result(seconds)
        except TimeoutError:
            raise invalid(
                f"the grammar takes more than {seconds:g} s to compile "
                "(max_grammar_compile_seconds): make it simpler"
            ) from None

    def close(self) -> None:
        """Compile nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _for_one_request(self, source: GrammarSource) -> Future[llguidance.LLMatcher]:
        """What the check compiled, if nobody has it yet; else another one."""
        with self._lock:
            known = self._look_up(source)
            spare, known.spare = known.spare, None
        if spare is not None:
            return spare
        return self._pool.submit(self._again, source, known.verdict)

    def _again(self, source: GrammarSource, verdict: Future[None]) -> llguidance.LLMatcher:
        if verdict.done():
            verdict.result()  # raises what the check raised
        return self._compile(source)

    def _look_up(self, source: GrammarSource) -> _Known:
        """What is known of a constraint; starts to find out. The lock is held."""
        known = self._known.get(source)
        if known is None:
            known = self._known[source] = _Known(self._pool.submit(self._compile, source))
            if len(self._known) > self._limits.max_cached_grammars:
                self._known.popitem(last=False)
        self._known.move_to_end(source)
        return known

    def _compile(self, source: GrammarSource) -> llguidance.LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = self._limits
        tokenizer, vocabulary = self._ll_tokenizer()
        matcher = LLMatcher(
            tokenizer,
            source.text,
            log_level=0,
            limits=LLParserLimits(
                initial_lexer_fuel=limits.max_grammar_compile_fuel,
                step_lexer_fuel=limits.max_grammar_step_fuel,
                max_lexer_states=limits.max_grammar_states,
                max_grammar_size=limits.max_grammar_symbols,
                verbose_errors=False,
            ),
        )
        # The first mask as well: what it costs is paid here, and some grammars fail only there.
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise invalid(f"the {_NAMES[source.kind]} cannot be kept: {_reason(matcher)}")
        if int.from_bytes(first_mask, "little") == 1 << vocabulary.size:
            raise invalid(f"the {_NAMES[source.kind]} allows nothing but the empty text")
        if dropped := matcher.get_grammar_warnings():
            logger.warning(
                "a %s is not kept in full: %s",
                _NAMES[source.kind],
                "; ".join(dict.fromkeys(dropped))[:_REASON_CHARS],
            )
        return matcher

    def _ll_tokenizer(self) -> tuple[llguidance.LLTokenizer, Vocabulary]:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                vocabulary = self._load_vocabulary()
                self._tokenizer = build_ll_tokenizer(vocabulary), vocabulary
            return self._tokenizer

    def _vocabulary(self) -> Vocabulary:
        return self._ll_tokenizer()[1]


class _Known:
    """Whether a constraint can be kept, and a compiled grammar that nobody has taken yet."""

    def __init__(self, compiled: Future[llguidance.LLMatcher]) -> None:
        self.verdict: Future[None] = Future()
        self.spare: Future[llguidance.LLMatcher] | None = compiled
        compiled.add_done_callback(self._decide)

    def _decide(self, compiled: Future[llguidance.LLMatcher]) -> None:
        if compiled.cancelled():
            self.verdict.cancel()
        elif (error := compiled.exception()) is not None:
            self.verdict.set_exception(error)
        else:
            self.verdict.set_result(None)


class CompiledGrammar:
    """A ``GrammarFuture``; its grammar is for one request."""

    def __init__(
        self,
        future: Future[llguidance.LLMatcher],
        vocabulary: Callable[[], Vocabulary],
        end_token_ids: Collection[int],
    ) -> None:
        self._future = future
        self._vocabulary = vocabulary
        self._end_token_ids = end_token_ids

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._future.done()

    def result(self) -> LLGuidanceGrammar:
        """The grammar in its first state; raises what compiling raised."""
        return LLGuidanceGrammar(self._future.result(), self._vocabulary(), self._end_token_ids)


_NAMES = {
    "json": "JSON schema",
    "json_object": "JSON object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


_WHERE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
"""A place in the Lark that was made of a user's schema tells the user nothing."""


def _reason(matcher: llguidance.LLMatcher) -> str:
    """llguidance's words in one line, without the excerpt of the grammar behind them."""
    words = []
    for line in matcher.get_error().splitlines():
        if "|" in line[:8] and line[:8].split("|")[0].strip(" 0123456789") == "":
            break
        words.append(line.strip().strip("^").strip())
    text = _WHERE.sub("", " ".join(word for word in words if word)) or "no reason is given"
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."
