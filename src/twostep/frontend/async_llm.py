"""The engine for programs that serve many at once: requests in, streams of outputs out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.outputs import EngineCoreOutputs
from twostep.contracts.pause import PauseMode
from twostep.contracts.pooling import PoolingParams
from twostep.contracts.results import EmbeddingRequestOutput, RequestOutput
from twostep.contracts.sampling import SamplingParams
from twostep.contracts.stats import IterationStats, StatsListener
from twostep.engine.client import AsyncCoreClient
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.input_processor import InputProcessor, ProcessedRequest, PromptType
from twostep.frontend.live_watch import LiveWatch
from twostep.frontend.output_processor import OutputProcessor
from twostep.frontend.request_stream import RequestStream
from twostep.frontend.tokenizer import LONG_TEXT_CHARS, Tokenizer


class AsyncLLM:
    """A running engine whose core lives elsewhere; for one event loop.

    Made by ``start_async_llm``; ``shutdown`` (or leaving ``async with``) ends it.
    """

    def __init__(
        self,
        client: AsyncCoreClient,
        info: EngineInfo,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        chat_prompter: ChatPrompter,
        tokenizer: Tokenizer,
    ) -> None:
        """On the running event loop. The client belongs to this object from now on."""
        self.info = info
        self.tokenizer = tokenizer
        self.chat_prompter = chat_prompter
        self.input_processor = input_processor
        self.stats_listeners: list[StatsListener] = []
        """Told after every step; append and remove as you like."""
        self._client = client
        self._output_processor = output_processor
        self._streams: dict[str, RequestStream] = {}
        """By core id: every sequence that has not ended."""
        self._watches: list[LiveWatch] = []
        self._dead: EngineDeadError | None = None
        self._died = asyncio.Event()
        self._closing = False
        self._idle = asyncio.Event()
        """No request is unfinished."""
        self._idle.set()
        client.start(self)

    # -- requests ----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt; outputs as ``sampling_params.output_kind`` asks.

        Closing the iterator, or cancelling the task that reads it, aborts the request. If only
        this request failed in the engine, the last output has finish_reason "error" and says why
        in ``stop_reason``.

        Raises:
            InvalidRequestError: Before the first output.
            EngineDeadError: The engine core has stopped.
        """
        stream = await self.add_request(
            request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """The vector of one text, as an iterator of one output; otherwise as ``generate``."""
        stream = await self.add_request(
            request_id, prompt, pooling_params, priority=priority, cache_salt=cache_salt
        )
        try:
            async for output in stream:
                yield EmbeddingRequestOutput.of(output)
        finally:
            stream.abort()

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str = "embd",
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """The vector of one text; see ``encode``. If only it failed, ``error`` says why."""
        outputs = self.encode(
            prompt,
            pooling_params or PoolingParams(),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                return output
        raise self.dead_error

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Check and queue a request; its outputs are read from the stream.

        With ``PoolingParams`` there is one output, which holds the ``embedding``.

        Whoever drops the stream before its end must call its ``abort``.

        Raises:
            InvalidRequestError: The request cannot be served.
            EngineDeadError: The engine core has stopped, or is shutting down.
        """
        self._check_open()
        if cache_salt is not None:
            prompt = _with_salt(prompt, cache_salt)
        request = await self._process(request_id, prompt, params, priority)
        self._check_open()
        ids = [core_request.request_id for core_request in request.core_requests]
        stream = RequestStream(request_id, ids, request.params.output_kind, self._abort_stream)
        self._output_processor.add_request(request, stream.put)
        self._streams.update(dict.fromkeys(ids, stream))
        self._idle.clear()
        try:
            for core_request in request.core_requests:
                self._client.add_request(core_request)
        except EngineDeadError:
            self._abort(ids)
            raise
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their readers get a last output saying "abort". Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self._abort(ids)

    async def _process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        priority: int,
    ) -> ProcessedRequest:
        process = self.input_processor.process
        # Long texts and grammars in a thread: both let go of the interpreter lock.
        has_grammar = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if not has_grammar and _text_length(prompt) <= LONG_TEXT_CHARS:
            return process(request_id, prompt, params, priority=priority or None)
        return await asyncio.to_thread(
            process, request_id, prompt, params, priority=priority or None
        )

    def _abort_stream(self, stream: RequestStream) -> None:
        self._abort(stream.core_ids)

    def _abort(self, ids: Iterable[str]) -> None:
        listeners = self.stats_listeners
        done = self._output_processor.abort_requests(ids, with_stats=bool(listeners))
        for core_id in done.reqs_to_abort:
            self._streams.pop(core_id, None)
        if done.reqs_to_abort:
            self._client.abort_requests(done.reqs_to_abort)
        for finished in done.finished:
            for listener in listeners:
                listener.on_finished(finished)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # -- news of the core --------------------------------------------------------------------

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """See CoreEvents."""
        listeners = self.stats_listeners
        iteration = None
        if listeners:
            iteration = IterationStats(timestamp=0.0, core_timestamp=outputs.timestamp)
        done = self._output_processor.process_outputs(outputs.outputs, iteration)
        if done.ended:
            for core_id in done.ended:
                self._streams.pop(core_id, None)
            self._note_idle()
        if done.reqs_to_abort:
            self._client.abort_requests(done.reqs_to_abort)
        if iteration is not None:
            for listener in listeners:
                listener.on_step(outputs.scheduler_stats, iteration)
            for finished in done.finished:
                for listener in listeners:
                    listener.on_finished(finished)

    def on_refused(self, request_id: str, error: InvalidRequestError) -> None:
        """See CoreEvents."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(error)
            self._abort(stream.core_ids)

    def on_live(self, update: LiveUpdate) -> None:
        """See CoreEvents."""
        for watch in self._watches:
            watch.put(update)

    def on_dead(self, error: EngineDeadError) -> None:
        """See CoreEvents."""
        self._dead = self._dead or error
        self._died.set()
        for watch in self._watches:
            watch.fail(self._dead)
        streams = list(self._streams.values())
        for stream in streams:
            stream.fail(self._dead)
        self._output_processor.abort_requests(list(self._streams))
        self._streams.clear()
        self._note_idle()

    # -- watching ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[LiveWatch]:
        """What the engine does, some ten times a second while it does anything.

        The core collects nothing while nobody watches. The iterator raises EngineDeadError when
        the core has stopped.
        """
        self._check_open()
        watch = LiveWatch()
        self._watches.append(watch)
        self._client.watch(True)
        try:
            yield watch
        finally:
            self._watches.remove(watch)
            if not self._watches:
                self._client.watch(False)

    # -- state -------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._dead is None and not self._closing

    @property
    def errored(self) -> bool:
        """Whether the engine core has stopped by itself."""
        return self._dead is not None

    async def wait_dead(self) -> None:
        """Return when the engine core has stopped by itself."""
        await self._died.wait()

    @property
    def dead_error(self) -> EngineDeadError:
        """What requests are answered when the engine core has stopped."""
        return self._dead or EngineDeadError("the engine core has stopped: restart it")

    @property
    def num_unfinished_requests(self) -> int:
        """Sequences that have not ended (a request with ``n`` counts n times)."""
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core has stopped, or has work and makes no progress."""
        if self._dead is not None:
            raise self._dead
        self._client.check_health(has_work=bool(self._streams))

    def _check_open(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._closing:
            raise EngineDeadError("the engine is shutting down and takes no more requests")

    # -- the core's controls -----------------------------------------------------------------

    async def reset_prefix_cache(self) -> bool:
        """Forget the KV of earlier prompts; False, and nothing happens, if requests hold KV."""
        self._check_open()
        return await self._client.reset_prefix_cache()

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop planning until ``resume``: "abort" ends all requests, "wait" lets started ones go
        on, "keep" leaves everybody where they are. New requests wait."""
        self._check_open()
        await self._client.pause(mode)

    async def resume(self) -> None:
        """Plan again."""
        self._check_open()
        await self._client.resume()

    # -- the end -----------------------------------------------------------------------------

    async def shutdown(self, timeout: float | None = None) -> None:
        """Take no more requests, give those that run ``timeout`` seconds, abort the rest, stop.

        Without ``timeout`` they are aborted at once. Safe to call twice; a second call with a
        shorter time ends the first one's waiting.
        """
        self._closing = True
        if timeout:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        self._abort(list(self._streams))
        for watch in self._watches:
            watch.fail(EngineDeadError("the engine was shut down"))
        await self._client.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()


def _text_length(prompt: PromptType) -> int:
    """Characters that have to be tokenised."""
    if isinstance(prompt, Mapping):
        text = None if "prompt_token_ids" in prompt else prompt.get("prompt")
        return len(text) if isinstance(text, str) else 0
    return len(prompt) if isinstance(prompt, str) else 0


def _with_salt(prompt: PromptType, cache_salt: str) -> PromptType:
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": cache_salt}
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": cache_salt}
    assert isinstance(prompt, Sequence)
    return {"prompt_token_ids": prompt, "cache_salt": cache_salt}
