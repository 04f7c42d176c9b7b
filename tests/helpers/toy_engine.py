"""A core on a device without numbers, under a random load: for those who watch cores.

Virtual time: looking at the clock takes a little, a step on the device takes longer, and whoever
waits for it moves the clock. So the same seed gives the same spans.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from twostep.config.engine import CacheConfig, SchedulerConfig
from twostep.contracts.executor import StepFuture
from twostep.contracts.grammar import GrammarCompiler
from twostep.contracts.observer import StepObserver
from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.contracts.request import EngineCoreRequest
from twostep.contracts.sampling import SamplingParams, StructuredOutputsParams
from twostep.engine.core import EngineCore


class ToyClock:
    """Virtual seconds; each look takes 10 microseconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now


@dataclasses.dataclass
class ToyFuture:
    """Waiting moves the clock to the end of the step."""

    clock: ToyClock
    output: ModelRunnerOutput
    error: BaseException | None = None
    end: float = 0.0

    def result(self) -> ModelRunnerOutput:
        if isinstance(self.error, KeyboardInterrupt):
            error, self.error = self.error, None
            raise error
        if self.error is not None:
            raise self.error
        self.clock.now = max(self.clock.now, self.end)
        return self.output

    def done(self) -> bool:
        return True


Fault = Callable[[SchedulerOutput], BaseException | None]


class ToyExecutor:
    """Tokens are a hash of request and position; prompts are known from the plans."""

    def __init__(self, clock: ToyClock, *, max_concurrent_batches: int = 2) -> None:
        self.max_concurrent_batches = max_concurrent_batches
        self.fail_execute: Fault = lambda plan: None
        self.fail_sample: Fault = lambda plan: None
        self.fail_result: Fault = lambda plan: None
        self._clock = clock
        self._known: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._plan: SchedulerOutput | None = None
        self._device_end = 0.0
        self.times_device = False
        self.proposes = 0
        """Drafts behind each sampled token."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture | None:
        plan = scheduler_output
        if (error := self.fail_execute(plan)) is not None:
            raise error
        for new in plan.scheduled_new_reqs:
            self._known[new.request_id] = len(new.prefill_token_ids)
            self._computed[new.request_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        self._computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if plan.total_num_scheduled_tokens == 0:
            return ToyFuture(self._clock, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
        self._plan = plan
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        plan = self._plan
        assert plan is not None
        if (error := self.fail_sample(plan)) is not None:
            raise error
        sampled = []
        for request_id, count in plan.num_scheduled_tokens.items():
            drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
            end = self._computed[request_id] + count - drafts
            is_done = end >= self._known[request_id]
            # Some drafts are right: their tokens come with the one after them.
            right = _hash(request_id, end) % (drafts + 1)
            tokens = [_hash(request_id, end + i) % 50 for i in range(right + 1)]
            sampled.append(tokens if is_done else [])
        output = ModelRunnerOutput(
            req_ids=list(plan.num_scheduled_tokens), sampled_token_ids=sampled
        )
        if self.proposes:
            output.draft_token_ids = {
                request_id: [_hash(request_id, i) % 50 for i in range(self.proposes)]
                for request_id, tokens in zip(output.req_ids, sampled, strict=True)
                if tokens
            }
        start = max(self._device_end, self._clock.now + 2e-6)
        self._device_end = start + 1e-3 + 1e-5 * plan.total_num_scheduled_tokens
        if self.times_device:
            middle = self._device_end - 1e-4
            output.device_spans = [
                ("forward", start, middle),
                ("sample", middle, self._device_end - 1e-5),
            ]
        return ToyFuture(self._clock, output, self.fail_result(plan), self._device_end)

    def time_device(self, wanted: bool = True) -> None:
        self.times_device = wanted

    def reset_after_failure(self) -> None:
        self._plan = None

    def shutdown(self) -> None:
        pass


@dataclasses.dataclass
class Toy:
    """A core and what belongs to it."""

    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    clock: ToyClock
    executor: ToyExecutor
    num_spec_tokens: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """What happened in ``run_load``."""

    def core(
        self, observer: StepObserver | None, grammars: GrammarCompiler | None = None
    ) -> EngineCore:
        return EngineCore(
            scheduler_config=self.scheduler_config,
            cache_config=self.cache_config,
            executor=self.executor,
            clock=self.clock,
            num_spec_tokens=self.num_spec_tokens,
            grammar_compiler=grammars,
            observer=observer,
        )


def make_toy(
    *, is_async: bool = True, num_blocks: int = 13, num_spec_tokens: int = 0, **scheduler: object
) -> Toy:
    """Small: 4 tokens a block, 16 a step, 4 requests at once."""
    clock = ToyClock()
    options: dict[str, object] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 40,
        "async_scheduling": is_async,
        "full_sequence_must_fit": False,
        **scheduler,
    }
    return Toy(
        SchedulerConfig(**options),  # type: ignore[arg-type]
        CacheConfig(num_blocks=num_blocks, block_size=4),
        clock,
        ToyExecutor(clock, max_concurrent_batches=2 if is_async else 1),
        num_spec_tokens,
    )


class ToyGrammar:
    """Refuses, cuts and ends by a hash of its name and of how far it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._length = 0

    def _draw(self, what: str, token_id: int = 0) -> int:
        return _hash(f"{self._name} {what} {token_id}", self._length)

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self._draw("refuse", token_id) % 40 == 0:
                return False
            self._length += 1
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids[: self._draw("cut") % (len(token_ids) + 1)])

    def rollback(self, num_tokens: int) -> None:
        self._length -= num_tokens

    def is_terminated(self) -> bool:
        return self._draw("end") % 12 == 0

    def fill_bitmask(self) -> bytes:
        return b"mask"


class ToyGrammarFuture:
    """Ready after some questions; one in five does not compile."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._questions_left = _hash(name, 0) % 6

    def done(self) -> bool:
        self._questions_left -= 1
        return self._questions_left < 0

    def result(self) -> ToyGrammar:
        if _hash(self._name, 1) % 5 == 0:
            raise ValueError(f"{self._name} is no grammar")
        return ToyGrammar(self._name)


class ToyCompiler:
    """Compiles a text by hashing it."""

    def compile(
        self, params: StructuredOutputsParams, end_token_ids: Collection[int]
    ) -> ToyGrammarFuture:
        assert params.grammar is not None
        return ToyGrammarFuture(params.grammar)


def make_request(
    request_id: str, prompt: list[int], max_tokens: int = 8, grammar: str | None = None
) -> EngineCoreRequest:
    """A greedy request."""
    structured = None if grammar is None else StructuredOutputsParams(grammar=grammar)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            temperature=0, max_tokens=max_tokens, seed=0, structured_outputs=structured
        ),
        eos_token_id=3,
        arrival_time=0.0,
    )


def run_load(
    toy: Toy,
    core: EngineCore,
    seed: int,
    *,
    faults: bool,
    steps: int = 60,
    structured: bool = False,
) -> None:
    """Arrivals, aborts (some while a step is waited for), resets, pauses, failures; it drains.

    ``structured``: two of three requests have a grammar.
    """
    rng = random.Random(seed)
    is_on = faults

    def fault(plan: SchedulerOutput) -> BaseException | None:
        if is_on and plan.num_scheduled_tokens and rng.random() < 0.03:
            toy.counts["interrupts" if rng.random() < 0.3 else "failures"] += 1
            return RuntimeError("poison") if rng.random() < 0.7 else KeyboardInterrupt()
        return None

    toy.executor.fail_execute = toy.executor.fail_sample = toy.executor.fail_result = fault
    number = 0
    for _ in range(steps):
        roll = rng.random()
        if roll < 0.4:
            prompt = [(7 * i) % 50 + 10 for i in range(rng.randint(1, 30))]
            most = rng.randint(1, 20)
            grammar = f"{seed} {number}" if structured and number % 3 else None
            core.add_request(make_request(f"r{number}", prompt, most, grammar))
            number += 1
        elif roll < 0.5 and number:
            toy.counts["aborts"] += 1
            victim = [f"r{rng.randrange(number)}", "nobody"]
            if rng.random() < 0.5:
                core.abort_requests(victim)
            else:
                core.aborts_queue.put(victim)
        elif roll < 0.53:
            toy.counts["resets"] += 1
            core.reset_prefix_cache(reset_running_requests=rng.random() < 0.6)
        elif roll < 0.57:
            toy.counts["pauses"] += 1
            core.pause(rng.choice(["keep", "wait", "abort"]))
        elif roll < 0.65:
            core.resume()
        step(core)
    is_on = False
    core.resume()
    for _ in range(2000):
        if not core.has_work():
            break
        step(core)
    assert not core.has_work()
    core.shutdown()


def _hash(request_id: str, position: int) -> int:
    return zlib.crc32(f"{request_id} {position}".encode())


def step(core: EngineCore) -> bool:
    """One step; whether it was interrupted."""
    try:
        core.step_fn()
    except KeyboardInterrupt:
        return True
    return False
