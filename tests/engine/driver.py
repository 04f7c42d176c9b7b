"""A seeded random user of the engine core; every stream must equal the one made alone."""

from __future__ import annotations

import dataclasses
import random

from ghost import VOCAB, GhostExecutor, oracle
from planning_helpers import FakeClock, check, check_drained, make_configs, make_engine_request

from twostep.contracts.errors import InvalidRequestError
from twostep.contracts.outputs import EngineCoreOutput
from twostep.contracts.plan import SchedulerOutput
from twostep.contracts.request import EngineCoreRequest, FinishReason
from twostep.engine.core import EngineCore


@dataclasses.dataclass
class Stream:
    """What a client has seen of one request."""

    request: EngineCoreRequest
    expected: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    is_aborted: bool = False
    poison_at: int | None = None


class Driver:
    """Random configuration, arrivals, aborts, failures; invariants after every step."""

    def __init__(self, seed: int, *, is_async: bool, policy: str, failures: bool) -> None:
        self.rng = rng = random.Random(f"{seed} {is_async} {policy} {failures}")
        block_size = rng.choice([1, 2, 3, 4, 8, 16])
        self.max_model_len = rng.choice([24, 48, 100])
        per_request = -(-self.max_model_len // block_size)
        window = rng.choice([None, None, None, 2, 5, 17])
        configs = make_configs(
            budget=rng.choice([1, 5, 16, 33, 64]),
            max_num_seqs=rng.choice([1, 2, 4, 8, 8]),
            max_model_len=self.max_model_len,
            num_blocks=rng.randint(max(2, per_request // 2), 2 * per_request) + 1,
            block_size=block_size,
            caching=rng.random() < 0.7,
            window=window,
            policy=policy,
            async_scheduling=is_async,
            long_prefill_token_threshold=rng.choice([0, 0, 5]),
            full_sequence_must_fit=rng.random() < 0.7,
        )
        self.ghost = GhostExecutor(block_size, window=window)
        self.core = EngineCore(
            scheduler_config=configs[0],
            cache_config=configs[1],
            executor=self.ghost,
            clock=FakeClock(),
        )
        self.window = window
        self.streams: dict[str, Stream] = {}
        self.old_streams: list[Stream] = []
        self.failures = failures
        self.num_failed_steps = 0
        self.num_transient_failures = 0
        for kind in ("fail_execute", "fail_sample", "fail_result"):
            setattr(self.ghost, kind, lambda plan, kind=kind: self._failure(plan, kind))
        self.ghost.bad_rows = self._bad_rows
        self.prefixes = [
            [rng.randrange(VOCAB) for _ in range(self.max_model_len)] for _ in range(3)
        ]

    def run(self, num_steps: int) -> None:
        """Random events between steps, then drain and compare everything."""
        for _ in range(num_steps):
            self._random_event()
            self._step()
        self.failures = False
        for _ in range(5000):
            if not self.core.has_work():
                break
            self._step()
        check_drained(self.core.scheduler)
        assert not self.ghost.rows
        for stream in [*self.old_streams, *self.streams.values()]:
            self._check_final(stream)

    def _step(self) -> None:
        scheduler = self.core.scheduler
        num_plans = len(self.ghost.plans)
        outputs, executed = self.core.step_fn()
        check(scheduler)
        for message in (outputs or {}).values():
            for output in message.outputs:
                self._receive(output)
        assert executed == any(
            plan.total_num_scheduled_tokens for plan in self.ghost.plans[num_plans:]
        )
        # Work conserving: the next plan is only empty if a step is in flight or nothing is left.
        made_progress = executed or outputs is not None
        assert made_progress or not self.core.has_work()

    def _receive(self, output: EngineCoreOutput) -> None:
        stream = self.streams[output.request_id]
        assert stream.finish is None, "news after the end"
        assert not stream.is_aborted
        if not stream.tokens and output.new_token_ids:
            self._check_first_output(stream, output)
        stream.tokens += output.new_token_ids
        stream.finish = output.finish_reason
        if stream.request.sampling_params.logprobs is not None and output.new_token_ids:
            assert output.new_logprobs is not None
            assert [row.token_ids[0] for row in output.new_logprobs] == output.new_token_ids

    def _check_first_output(self, stream: Stream, output: EngineCoreOutput) -> None:
        prompt = stream.request.prompt_token_ids
        assert output.prefill_stats is not None
        assert output.prefill_stats.num_prompt_tokens == len(prompt)
        assert output.prefill_stats.num_cached_tokens < len(prompt)
        if stream.request.sampling_params.prompt_logprobs is None:
            assert output.new_prompt_logprobs is None
        else:
            assert output.prefill_stats.num_cached_tokens == 0
            rows = output.new_prompt_logprobs
            assert rows is not None
            assert [row.token_ids[0] for row in rows] == prompt[1:]
            assert [row.logprobs[0] for row in rows] == [-float(p) for p in range(len(prompt) - 1)]

    def _check_final(self, stream: Stream) -> None:
        if stream.is_aborted:
            assert stream.finish is None
            assert stream.tokens == stream.expected[: len(stream.tokens)]
        elif stream.finish is FinishReason.ERROR:
            assert stream.poison_at is not None, "an innocent request ended with an error"
            assert stream.tokens == stream.expected[: len(stream.tokens)]
        else:
            assert stream.tokens == stream.expected
            stopped = stream.tokens[-1] in _stop_ids(stream.request)
            assert stream.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    # ------------------------------------------------------------ what users do

    def _random_event(self) -> None:
        roll = self.rng.random()
        if roll < 0.35:
            for _ in range(self.rng.choice([1, 1, 1, 2, 5])):
                self._add()
        elif roll < 0.45 and self.streams:
            self._abort(self.rng.choice(list(self.streams)))
        elif roll < 0.47:
            self.core.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.7)

    def _add(self) -> None:
        rng = self.rng
        reuse = rng.random() < 0.2 and self.streams
        request_id = rng.choice(list(self.streams)) if reuse else f"r{len(self.streams)}"
        longest = rng.choice([self.max_model_len, self.max_model_len // 4])
        prompt = rng.choice(self.prefixes)[: rng.randint(1, longest)]
        if rng.random() < 0.5:
            prompt = [*prompt[:-1], rng.randrange(VOCAB)]
        request = make_engine_request(
            request_id,
            prompt,
            rng.randint(1, self.max_model_len),
            eos=rng.choice([None, 3]),
            stop_token_ids=rng.choice([None, [5, 3]]),
            priority=rng.randint(0, 2),
            arrival=float(rng.randint(0, 5)),
            salt=rng.choice([None, None, "tenant"]),
            client=rng.randint(0, 1),
            logprobs=rng.choice([None, 0]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        limit = self.core.scheduler.max_seq_tokens - len(prompt)
        is_alive = request_id in self.core.scheduler.requests
        try:
            self.core.add_request(request)
        except InvalidRequestError:
            assert is_alive or limit <= 0
            return
        assert not is_alive
        assert limit > 0
        if request_id in self.streams:
            self.old_streams.append(self.streams[request_id])
        max_tokens = min(request.sampling_params.max_tokens or 0, limit)
        expected = oracle(prompt, max_tokens, _stop_ids(request), self.window)
        stream = self.streams[request_id] = Stream(request, expected)
        if self.failures and rng.random() < 0.1:
            stream.poison_at = rng.randint(1, len(prompt) + 5)

    def _abort(self, request_id: str) -> None:
        stream = self.streams[request_id]
        if stream.finish is None:
            stream.is_aborted = True
        if self.rng.random() < 0.5:
            self.core.abort_requests([request_id, "nobody"])
        else:
            self.core.aborts_queue.put([request_id])
            self.core._process_aborts_queue()

    # ------------------------------------------------------------ what goes wrong

    def _poisoned(self, plan: SchedulerOutput) -> list[str]:
        computed = {new.request_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return [
            request_id
            for request_id, n in plan.num_scheduled_tokens.items()
            if (stream := self.streams[request_id]).poison_at is not None
            and stream.poison_at <= computed[request_id] + n
        ]

    def _failure(self, plan: SchedulerOutput, kind: str) -> Exception | None:
        for request_id in self._poisoned(plan):
            kinds = ("fail_execute", "fail_sample", "fail_result", "bad_rows")
            if kinds[self.streams[request_id].poison_at % 4] == kind:  # type: ignore[operator]
                self.num_failed_steps += 1
                return RuntimeError("poison")
        if self.failures and len(plan.num_scheduled_tokens) > 1 and self.rng.random() < 0.01:
            self.num_transient_failures += 1
            return RuntimeError("cosmic ray")
        return None

    def _bad_rows(self, plan: SchedulerOutput) -> dict[str, str]:
        return {
            request_id: "NaN logits"
            for request_id in self._poisoned(plan)
            if self.streams[request_id].poison_at % 4 == 3  # type: ignore[operator]
        }


def _stop_ids(request: EngineCoreRequest) -> set[int]:
    stops = set(request.sampling_params.stop_token_ids or ())
    return stops if request.eos_token_id is None else {*stops, request.eos_token_id}
