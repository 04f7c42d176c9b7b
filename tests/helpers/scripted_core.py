"""An engine core that says what a test wants, under the real front end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from helpers.tiny_text import gguf_tokenizer

from twostep.contracts.engine_info import EngineInfo
from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.live_view import LiveUpdate
from twostep.contracts.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    PrefillStats,
    TokenLogprobs,
)
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.engine.client import CoreEvents
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor
from twostep.frontend.tokenizer import Tokenizer

MAX_MODEL_LEN = 256


class ScriptedCore:
    """Emits the tokens of ``reply(request)`` one a tick, then the end of text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.reply: Callable[[EngineCoreRequest], str | list[int]] = lambda request: "Hello there."
        self.tokens_per_tick = 1
        self.fail_after: int | None = None
        """Each request fails after so many tokens."""
        self.refuse: str | None = None
        """The core refuses every request, with this message."""
        self.stall_after: int | None = None
        """Each request says nothing more after so many tokens, until ``go``."""
        self.healthy = True
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.seen_prompts: set[tuple[int, ...]] = set()
        self.is_watched = False
        self._events: CoreEvents | None = None
        self._go = asyncio.Event()

    # -- AsyncCoreClient ---------------------------------------------------------------------

    def start(self, events: CoreEvents) -> None:
        self._events = events

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        self.running[request.request_id] = asyncio.ensure_future(self._run(request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            if (task := self.running.pop(request_id, None)) is not None:
                task.cancel()

    async def reset_prefix_cache(self) -> bool:
        self.seen_prompts.clear()
        return True

    async def pause(self, mode: str) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    def watch(self, wanted: bool) -> None:
        self.is_watched = wanted

    def check_health(self, *, has_work: bool) -> None:
        if not self.healthy:
            raise EngineDeadError("the engine core makes no progress")

    async def shutdown(self) -> None:
        for task in self.running.values():
            task.cancel()
        self.running.clear()

    # -- what tests do -----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what an earlier test wanted."""
        self.__init__(self.tokenizer)  # type: ignore[misc]

    def show(self, update: LiveUpdate) -> None:
        """Something to see for those who watch."""
        assert self._events is not None
        self._events.on_live(update)

    def go(self) -> None:
        """Requests that stalled go on."""
        self._go.set()

    def die(self) -> None:
        """The core stops."""
        for task in self.running.values():
            task.cancel()
        assert self._events is not None
        self._events.on_dead(EngineDeadError("the engine core has stopped: killed by a test"))

    # -- inside ------------------------------------------------------------------------------

    async def _run(self, request: EngineCoreRequest) -> None:
        assert self._events is not None
        await asyncio.sleep(0)
        if self.refuse is not None:
            self.running.pop(request.request_id, None)
            self._events.on_refused(request.request_id, InvalidRequestError(self.refuse, "prompt"))
            return
        done = 0
        for output in self._outputs(request):
            if self.stall_after is not None and done >= self.stall_after:
                await self._go.wait()
            done += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.running.pop(request.request_id, None)
            self._events.on_outputs(EngineCoreOutputs(outputs=[output]))
            await asyncio.sleep(0)

    def _outputs(self, request: EngineCoreRequest) -> Iterable[EngineCoreOutput]:
        params = request.sampling_params
        reply = self.reply(request)
        ids = self.tokenizer.encode(reply, False) if isinstance(reply, str) else list(reply)
        if request.eos_token_id is not None:
            ids = [*ids, request.eos_token_id]
        assert params.max_tokens is not None
        is_cut = len(ids) > params.max_tokens
        ids = ids[: params.max_tokens]
        stops = {request.eos_token_id, *(params.stop_token_ids or [])}
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        if end is not None:
            ids, is_cut = ids[: end + 1], False
        count = 0
        while ids:
            piece, ids = ids[: self.tokens_per_tick], ids[self.tokens_per_tick :]
            first = count == 0
            count += len(piece)
            reason = None
            if self.fail_after is not None and count >= self.fail_after:
                reason, ids = FinishReason.ERROR, []
            elif not ids:
                reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            yield self._output(request, piece, reason, first=first)

    def _output(
        self,
        request: EngineCoreRequest,
        piece: list[int],
        reason: FinishReason | None,
        *,
        first: bool,
    ) -> EngineCoreOutput:
        params, prompt = request.sampling_params, request.prompt_token_ids
        stop_reason: int | str | None = None
        if reason == FinishReason.ERROR:
            stop_reason = "NaN in /srv/model at 0x7f0012345678"
        elif reason == FinishReason.STOP and piece[-1] != request.eos_token_id:
            stop_reason = piece[-1]
        prefill = None
        if first:
            cached = 16 * ((len(prompt) - 1) // 16) if tuple(prompt) in self.seen_prompts else 0
            self.seen_prompts.add(tuple(prompt))
            prefill = PrefillStats(num_prompt_tokens=len(prompt), num_cached_tokens=cached)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=piece,
            new_logprobs=self._logprobs(piece, params.logprobs, params.logprob_token_ids or ()),
            new_prompt_logprobs=self._logprobs(prompt[1:], params.prompt_logprobs)
            if first
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            prefill_stats=prefill,
        )

    def _logprobs(
        self, ids: list[int], most: int | None, certain: Sequence[int] = ()
    ) -> list[TokenLogprobs] | None:
        """The chosen token is the likeliest, then come its neighbours, or certain tokens."""
        if most is None:
            return None
        if certain:
            values = [-0.5, *(-1.0 - token_id for token_id in certain)]
            return [TokenLogprobs([token, *certain], values, 1) for token in ids]
        return [
            TokenLogprobs(
                token_ids=[token, *((token + i) % 260 for i in range(most))],
                logprobs=[-0.5, *(-0.5 - i for i in range(most))],
                rank=1,
            )
            for token in ids
        ]


def make_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """The tiny models' tokenizer."""
    metadata = gguf_tokenizer()
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    return Tokenizer.from_gguf_metadata(metadata)


def make_async_llm(core: ScriptedCore, **options: object) -> AsyncLLM:
    """The real front end on a scripted core. On the event loop."""
    tokenizer = core.tokenizer
    info = EngineInfo(
        model="tiny",
        model_path="/secret/tiny.gguf",
        architecture="llama",
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_gpu_blocks=64,
        kv_cache_dtype="fp32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_threads=1,
        heartbeat_timeout=10.0,
        version="0",
    )
    return AsyncLLM(
        core,
        info,
        InputProcessor(tokenizer, MAX_MODEL_LEN, tokenizer.vocab_size, **options),  # type: ignore[arg-type]
        OutputProcessor(tokenizer),
        ChatPrompter(tokenizer),
        tokenizer,
    )
