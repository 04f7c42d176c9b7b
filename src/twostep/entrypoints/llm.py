"""The offline face: text in, text out, in one process, with vLLM's names."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from twostep.config.engine import (
    DEFAULT_PREFILL_BURST_TOKENS,
    ConvertType,
    KVCacheDtype,
    LinearPrecision,
    RunnerType,
    SchedulingPolicy,
)
from twostep.contracts.errors import EngineDeadError, InvalidRequestError
from twostep.contracts.pooling import PoolingParams, PoolingType
from twostep.contracts.results import EmbeddingRequestOutput, RequestOutput
from twostep.contracts.sampling import RequestOutputKind, SamplingParams
from twostep.entrypoints.boot import BootReport
from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.inproc_engine import build_engine
from twostep.entrypoints.progress import reporter_for
from twostep.entrypoints.resolve import resolve
from twostep.entrypoints.tracing.watch import Watch
from twostep.frontend.input_processor import PromptType
from twostep.frontend.tokenizer import Tokenizer

Message = Mapping[str, Any]
AnyParams = SamplingParams | PoolingParams


class LLM:
    """A model, loaded and ready.

    ``with LLM("smollm2-135m") as llm: llm.generate("Hello")``. Without ``with``, call ``close``.
    Not for use from several threads at once.
    """

    boot: BootReport
    """What the start found and chose."""
    watch: Watch
    """The files of ``trace`` and ``record``."""

    def __init__(
        self,
        model: str | Path,
        *,
        runner: RunnerType = "auto",
        convert: ConvertType = "auto",
        pooling_type: PoolingType | None = None,
        normalize: bool | None = None,
        quantization: str | None = None,
        linear_precision: LinearPrecision = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        async_scheduling: bool = True,
        scheduling_policy: SchedulingPolicy = "fcfs",
        long_prefill_token_threshold: int = 0,
        prefill_burst_tokens: int = DEFAULT_PREFILL_BURST_TOKENS,
        watermark: float = 0.0,
        enforce_eager: bool = False,
        seed: int = 0,
        threads: int | None = None,
        chat_template: str | None = None,
        trace: str | Path | None = None,
        record: str | Path | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Load ``model``: a catalogue name, a ``.gguf`` file, a directory, or a Hub repository.

        Args:
            model: Fetched if it is not on disk.
            runner: ``generate`` text or make embeddings (``pooling``); ``auto`` is what the
                checkpoint is for.
            convert: ``embed``: make embeddings with a model that generates.
            pooling_type: How the hidden states of a text become a vector: ``last``, ``mean`` or
                ``cls``; by default what the checkpoint says, or the last token's.
            normalize: Whether vectors have length 1; by default what the checkpoint says, or yes.
            quantization: ``q8_0``, ``q4_0`` or ``q4_1``: quantise float weights while loading.
            linear_precision: Activations of quantised layers: ``int8`` (fast, the default) or
                ``bf16`` (exact).
            kv_cache_dtype: ``bf16``, ``fp16`` or ``fp32``; ``auto`` is what the kernels prefer.
            kv_cache_memory_bytes: Size of the KV cache; by default what is needed and free.
            max_model_len: Longest sequence, prompt and answer together.
            max_num_seqs: Requests running at once.
            max_num_batched_tokens: Token budget of one step.
            enable_prefix_caching: Keep the KV of earlier prompts for reuse.
            enable_chunked_prefill: Let a long prompt share steps with others.
            async_scheduling: Plan step k while step k-1 runs.
            scheduling_policy: ``fcfs`` or ``priority``.
            long_prefill_token_threshold: Most tokens of one prompt in a step while others wait or
                run, so that their tokens do not wait for all of it; 0 is no cap.
            prefill_burst_tokens: Most tokens of steps in a row in which prompts go before
                requests that decode, while many wait and few decode; 0: never.
            watermark: Share of the KV cache, 0 to 1, that stays free when a request is admitted
                beside others: fewer preemptions.
            enforce_eager: Launch the forward pass op by op instead of as one plan; for debugging.
            seed: Seeds the seeds of requests that bring none.
            threads: Compute threads; by default the usable cores.
            chat_template: Jinja source that replaces the model's own.
            trace: File for a Chrome/Perfetto trace of every step; complete after ``close``.
            record: File for a recording that ``twostep replay`` runs again.
            progress: Called with (phase, fraction) while loading.

        Raises:
            ModelError, OutOfMemoryError, UsageError: One line with cause and cure.
        """
        options = EngineOptions(
            runner=runner,
            convert=convert,
            pooling_type=pooling_type,
            normalize=normalize,
            quantization=quantization,
            linear_precision=linear_precision,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            async_scheduling=async_scheduling,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            prefill_burst_tokens=prefill_burst_tokens,
            watermark=watermark,
            enforce_eager=enforce_eager,
            threads=threads,
            trace=None if trace is None else str(trace),
            record=None if record is None else str(record),
        )
        engine = build_engine(resolve(model, reporter_for()).path, options, progress)
        self.boot = engine.boot
        self.watch = engine.watch
        self._engine = engine
        self._client = engine.client
        self._next_id = 0
        self._closed = False
        self._input_processor = engine.text.input_processor(
            engine.max_model_len,
            engine.config.vocab_size,
            scheduling_policy,
            _seed_source(seed),
            check_grammar=engine.grammar_compiler.validate,
            pooler=engine.pooler,
        )
        self._output_processor = engine.text.output_processor()
        self._chat_prompter = engine.text.chat_prompter(chat_template)

    # -- generating --------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; all of them run together. Outputs are in the order of the prompts.

        Args:
            prompts: Text, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, or a list of these.
            sampling_params: One for all, or one for each.
            use_tqdm: Show a progress bar on a terminal.

        Raises:
            InvalidRequestError: A prompt or parameter is out of range; nothing ran then.
        """
        many = _as_list(prompts)
        return self._run(many, _one_each(sampling_params, len(many)), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each text; all run together. Outputs are in the order of the prompts.

        Args:
            prompts: As ``generate``'s.
            pooling_params: For all of them.
            use_tqdm: Show a progress bar on a terminal.

        Raises:
            InvalidRequestError: A text is empty or too long, or the model makes no embeddings;
                nothing ran then.
        """
        many = _as_list(prompts)
        params = [pooling_params or PoolingParams()] * len(many)
        outputs = self._run(many, params, use_tqdm=use_tqdm)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; see ``generate``."""
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        prompts = [
            self._chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, _one_each(sampling_params, len(prompts)), use_tqdm=use_tqdm)

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, piece by piece (DELTA outputs).

        The request starts with the first ``next``; closing the iterator aborts it.
        """
        params = (sampling_params or self.get_default_sampling_params()).clone()
        params.output_kind = RequestOutputKind.DELTA
        [request_id] = self._add([prompt], [params])
        with self._abort_on_error([request_id]):
            while True:
                for output in self.step():
                    if output.request_id == request_id:
                        yield output
                        if output.finished:
                            return

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, piece by piece; see ``stream``."""
        return self.stream(
            self._chat_prompt(messages, template_kwargs=chat_template_kwargs), sampling_params
        )

    def step(self) -> list[RequestOutput]:
        """One engine step: what it has to tell. The loop under all of the above."""
        self._check_open()
        news = self._client.get_output()
        processed = self._output_processor.process_outputs(news.outputs)
        if processed.reqs_to_abort:
            self._client.abort_requests(processed.reqs_to_abort)
        return processed.request_outputs

    def add_request(self, prompt: PromptType, sampling_params: SamplingParams) -> str:
        """Queue a request for ``step``; returns its id."""
        [request_id] = self._add([prompt], [sampling_params])
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request; nothing more will come of it."""
        self._client.abort_requests(
            self._output_processor.abort_requests([request_id]).reqs_to_abort
        )

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to do."""
        return self._client.has_work()

    # -- facts -------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh copy of what a request without parameters gets."""
        return self._input_processor.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of earlier prompts; False if requests still run."""
        self._check_open()
        return self._client.reset_prefix_cache()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Drop all requests and free the memory. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._client.close()
            self._engine.grammar_compiler.close()
            self.watch.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("this LLM was closed; make a new one")

    def _chat_prompt(self, messages: Any, **options: Any) -> dict[str, Any]:
        text, ids = self._chat_prompter.encode(messages, **options)
        return {"prompt": text, "prompt_token_ids": ids}

    def _add(self, prompts: Sequence[PromptType], params: Sequence[AnyParams]) -> list[str]:
        """Check all, then queue all: an error in one leaves nothing behind."""
        self._check_open()
        first = self._next_id
        self._next_id += len(prompts)
        requests = [
            self._input_processor.process(str(first + i), prompt, params[i])
            for i, prompt in enumerate(prompts)
        ]
        queued: list[str] = []
        try:
            for request in requests:
                for core_request in request.core_requests:
                    self._client.add_request(core_request)
                    queued.append(core_request.request_id)
                self._output_processor.add_request(request)
        except InvalidRequestError:
            self._client.abort_requests(queued)
            self._output_processor.abort_requests([request.request_id for request in requests])
            raise
        return [request.request_id for request in requests]

    def _run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[AnyParams],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        final = [_only_final(each) for each in params]
        ids = self._add(prompts, final)
        results: dict[str, RequestOutput] = {}
        wanted = frozenset(ids)  # requests of ``add_request`` may be on their way as well
        with self._abort_on_error(ids), _progress_bar(len(ids), use_tqdm) as bar:
            while len(results) < len(ids):
                for output in self.step():
                    if output.finished and output.request_id in wanted:
                        results[output.request_id] = output
                        bar(output)
        return [results[request_id] for request_id in ids]

    @contextlib.contextmanager
    def _abort_on_error(self, request_ids: list[str]) -> Iterator[None]:
        """Ctrl-C, a closed stream or an error leaves no request running."""
        try:
            yield
        except BaseException:
            if not self._closed:
                for request_id in request_ids:
                    self.abort(request_id)
            raise


def _as_list(prompts: Any) -> list[PromptType]:
    """A list of prompts; a text, a mapping or a list of ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams() for _ in range(count)]
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {count} prompts; give one, or one for each",
            "sampling_params",
        )
    return list(params)


def _only_final(params: AnyParams) -> AnyParams:
    if isinstance(params, PoolingParams):
        return params
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _seed_source(seed: int) -> Callable[[], int]:
    generator = random.Random(seed)
    return lambda: generator.getrandbits(63)


@contextlib.contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A tqdm bar over requests, with token speed; nothing if not wanted."""
    if not show:
        yield lambda _: None
        return
    from tqdm import tqdm  # imported late: half of all starts never need it

    num_tokens = 0
    with tqdm(total=total, desc="Requests", disable=None, dynamic_ncols=True) as bar:

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s")
            bar.update()

        yield advance
