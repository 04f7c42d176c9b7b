"""Runs one HTTP request's prompts on the engine and sends the answer, streamed or whole.

The order of events is kept here, once for all endpoints: checks before anything is queued, the
status before the first byte, exactly one end of a stream, and an abort whenever nobody will read
the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.outputs import NO_TOKEN_LEFT
from twostep.contracts.pooling import PoolingParams
from twostep.contracts.request import FinishReason
from twostep.contracts.results import CompletionOutput, RequestOutput
from twostep.contracts.sampling import SamplingParams
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.input_processor import PromptType
from twostep.frontend.request_stream import RequestStream
from twostep.server.errors import ApiError, from_exception, internal, is_ours
from twostep.server.http import ClientGone, HttpCall
from twostep.server.in_flight import Interrupt, RequestInterrupted, RequestScope
from twostep.server.load_report import load_report
from twostep.server.prompts import off_loop
from twostep.server.sampling import renamed
from twostep.server.sse import EventStream, error_event
from twostep.server.state import ServerState

logger = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True):
    """One prompt and how it is to be continued, or made a vector of."""

    prompt: PromptType
    num_tokens: int
    """Of the prompt; an estimate if it is still text."""
    params: SamplingParams | PoolingParams

    @property
    def num_sequences(self) -> int:
        """What the engine will run for it."""
        return self.params.n if isinstance(self.params, SamplingParams) else 1


class AnswerWriter(Protocol):
    """Turns outputs into what one endpoint's clients read. One for each HTTP request."""

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The JSON document of a whole answer, from each prompt's final output."""
        ...

    def events(self, index: int, output: RequestOutput) -> bytes:
        """The events of a DELTA output of prompt ``index``; may be empty."""
        ...

    def last_events(self) -> bytes:
        """What comes when all prompts have ended."""
        ...


class Generation:
    """One HTTP request on its way."""

    def __init__(
        self,
        state: ServerState,
        call: HttpCall,
        jobs: Sequence[Job],
        *,
        name: str,
        cache_salt: str | None = None,
        param_names: dict[str, str] | None = None,
    ) -> None:
        """``name``: the answer's id. ``param_names``: fields under which clients know parameters.

        Raises ApiError if requests are not taken, or too many wait.
        """
        self._state = state
        self._call = call
        self._jobs = jobs
        self._name = name
        self._cache_salt = cache_salt
        self._param_names = param_names or {}
        self._engine: AsyncLLM = state.engine
        self._scope: RequestScope = state.in_flight.admit(
            sum(job.num_sequences for job in jobs), sum(job.num_tokens for job in jobs)
        )

    async def answer(self, writer: AnswerWriter, *, stream: bool) -> None:
        """Generate and send. Raises ApiError, InvalidRequestError or ClientGone if nothing was sent
        yet; what goes wrong later ends the stream with an error event."""
        if stream:
            await self._answer_stream(writer)
            return
        try:
            async with self._scope, self._watch_client():
                outputs = await self._collect()
        except RequestInterrupted as interrupted:
            raise self._end(interrupted) from None
        report = load_report(self._call, self._state.observability)
        await self._call.answer(writer.body(outputs), headers=report)

    async def _answer_stream(self, writer: AnswerWriter) -> None:
        settings = self._state.settings
        events = EventStream(
            self._call,
            keep_alive=settings.sse_keep_alive_interval,
            stall_timeout=settings.stream_stall_timeout,
        )
        try:
            try:
                async with self._scope, self._watch_client():
                    # In a task of its own, because it is woken for every token: as a part of this
                    # one it would be reached through the frames of all layers of the server.
                    await asyncio.create_task(self._write_events(writer, events))
            except RequestInterrupted as interrupted:
                raise self._end(interrupted) from None
        except ClientGone:
            raise
        except Exception as error:
            if not events.is_open:
                raise
            if is_ours(error):
                logger.exception("request %s failed while it streamed", self._call.request_id)
            await events.finish(error_event(from_exception(error)))
        finally:
            events.close()

    async def _write_events(self, writer: AnswerWriter, events: EventStream) -> None:
        async with self._started() as streams:
            left = len(streams)
            if left == 1:  # nothing to merge
                async for output in streams[0]:
                    self._check(output)
                    data = writer.events(0, output)
                    if output.finished:
                        await events.finish(data + writer.last_events())
                    elif data and not events.push(data):
                        await events.write(data)
                return
            async for ready in _merged(streams):
                data = b""
                for index, output in ready:
                    self._check(output)
                    data += writer.events(index, output)
                    left -= output.finished
                if not left:
                    await events.finish(data + writer.last_events())
                elif data and not events.push(data):
                    await events.write(data)

    async def _collect(self) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async with self._started() as streams:
            async for ready in _merged(streams):
                for index, output in ready:
                    self._check(output)
                    outputs[index] = output
        return [outputs[index] for index in range(len(self._jobs))]

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[list[RequestStream]]:
        """All prompts queued; on the way out none of them goes on."""
        streams: list[RequestStream] = []
        try:
            for job in await self._checked_jobs():
                request_id = f"{self._name}-{self._state.in_flight.next_number()}"
                try:
                    stream = await self._engine.add_request(
                        request_id,
                        job.prompt,
                        job.params,
                        priority=job.params.priority,
                        cache_salt=self._cache_salt,
                    )
                except InvalidRequestError as error:
                    raise renamed(error, self._param_names) from None
                streams.append(stream)
                self._trace(request_id, job.params)
            yield streams
        except InvalidRequestError as error:  # the core refused it
            raise renamed(error, self._param_names) from None
        finally:
            for stream in streams:
                stream.abort()

    def _trace(self, request_id: str, params: SamplingParams | PoolingParams) -> None:
        tracer = self._state.observability.tracer
        if tracer is None:
            return
        sampling = params if isinstance(params, SamplingParams) else None
        operation = "chat" if self._name.startswith("chatcmpl") else "text_completion"
        if sampling is None:
            operation = "embeddings"
        tracer.begin(request_id, sampling, operation, self._call.header)

    async def _checked_jobs(self) -> Sequence[Job]:
        """All jobs; of several, all are checked before the first is queued."""
        if len(self._jobs) == 1:
            return self._jobs
        checked = []
        for job in self._jobs:
            text = job.prompt if isinstance(job.prompt, str) else ""
            processed = await off_loop(
                len(text),
                functools.partial(
                    self._engine.input_processor.process, self._name, job.prompt, job.params
                ),
            )
            ids = processed.prompt_token_ids
            prompt: dict[str, Any] = {"prompt_token_ids": ids}
            if processed.prompt is not None:
                prompt["prompt"] = processed.prompt
            checked.append(Job(prompt, len(ids), job.params))
        return checked

    def _check(self, output: RequestOutput) -> None:
        """Note progress; raise if a sequence ended in a way that is no success."""
        self._scope.started()
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._check_end(completion)

    def _check_end(self, completion: CompletionOutput) -> None:
        if completion.finish_reason == str(FinishReason.ERROR):
            if completion.stop_reason == NO_TOKEN_LEFT:
                raise ApiError(
                    "invalid_value",
                    f"{NO_TOKEN_LEFT}: its constraints (structured output, allowed_token_ids, "
                    "bad_words, min_tokens) exclude each other, or are too much work",
                )
            logger.error(
                "request %s failed in the engine: %s",
                self._call.request_id,
                completion.stop_reason,
            )
            raise internal()
        if completion.finish_reason == str(FinishReason.ABORT):
            raise ApiError("internal_error", "the request was aborted")

    def _end(self, interrupted: RequestInterrupted) -> Exception:
        if interrupted.why is Interrupt.DISCONNECTED:
            return ClientGone()
        return interrupted.api_error()

    @contextlib.asynccontextmanager
    async def _watch_client(self) -> AsyncIterator[None]:
        """Interrupt the request when its client goes."""

        async def watch() -> None:
            while (await self._call.receive())["type"] != "http.disconnect":
                pass
            self._scope.interrupt(Interrupt.DISCONNECTED)

        watcher = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watcher.cancel()


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
    """Outputs of all streams as they come; those that are ready together come together."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield [(0, output)]
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)
    # While the reader is slow the queue is full, and outputs wait in their streams, merged.

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            ready: list[tuple[int, RequestOutput]] = []
            item = await queue.get()
            while True:
                index, found = item
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    ready.append((index, found))
                if queue.empty():
                    break
                item = queue.get_nowait()
            if ready:
                yield ready
    finally:
        for task in pumps:
            task.cancel()
