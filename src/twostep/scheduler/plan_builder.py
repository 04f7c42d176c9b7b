"""The plan of one step while it is being made."""

from __future__ import annotations

from twostep.contracts.plan import CachedRequestData, NewRequestData, SchedulerOutput
from twostep.scheduler.request import Request

_NOBODY: frozenset[str] = frozenset()


class PlanBuilder:
    """Collects who runs how many tokens. Counters of requests are not touched here.

    The lists are parallel and in plan order. Running requests come before new ones in a plan,
    whoever was chosen first.
    """

    __slots__ = (
        "awaits_blocks",
        "awaits_grammar_tokens",
        "has_preempted",
        "has_structured_requests",
        "new_block_ids",
        "new_reqs",
        "new_requests",
        "num_computed_tokens",
        "num_new_tokens",
        "num_output_tokens",
        "num_scheduled_tokens",
        "req_ids",
        "requests",
        "spec_tokens",
        "step_id",
        "token_budget",
    )

    def __init__(self, step_id: int, token_budget: int) -> None:
        self.step_id = step_id
        self.token_budget = token_budget
        """Tokens that may still be planned."""
        self.has_preempted = False
        self.awaits_blocks = False
        """Whether a running request sits out until steps in flight give blocks back."""
        self.has_structured_requests = False
        self.awaits_grammar_tokens = False
        """Whether a structured request of the plan has a token on its way."""
        self.requests: list[Request] = []
        """Running ones; everybody in the plan once it is built."""
        self.new_requests: list[Request] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.num_new_tokens: dict[str, int] = {}
        self.req_ids: list[str] = []
        self.new_block_ids: list[list[int] | None] = []
        self.num_computed_tokens: list[int] = []
        self.num_output_tokens: list[int] = []
        self.new_reqs: list[NewRequestData] = []
        self.spec_tokens: dict[str, list[int]] = {}

    @property
    def may_start_requests(self) -> bool:
        """Whether waiting requests may have what is left.

        Not while a running one is short of blocks: they would take what was just won for it.
        But a step is not left empty because of a preemption.
        """
        if self.awaits_blocks:
            return False
        return not self.has_preempted or not self.requests

    def add_running(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """A request that the runner knows takes part."""
        request_id = request.request_id
        self.requests.append(request)
        self.num_scheduled_tokens[request_id] = num_tokens
        self.token_budget -= num_tokens
        self.req_ids.append(request_id)
        self.new_block_ids.append(new_block_ids or None)
        self.num_computed_tokens.append(request.num_computed_tokens)
        self.num_output_tokens.append(
            request.num_tokens - request.num_prompt_tokens + request.num_output_placeholders
        )

    def add_new(self, request: Request, num_tokens: int, block_ids: list[int], hit: int) -> None:
        """A request that the runner has no row for takes part, with all its known tokens.

        ``hit``: tokens whose KV is there already.
        """
        self.new_requests.append(request)
        self.num_new_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        self.new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_len=request.num_prompt_tokens,
                prefill_token_ids=request.known_token_ids(),
                sampling_params=request.sampling_params,
                stop_token_ids=request.masked_stop_token_ids(),
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                num_cached_tokens=hit,
            )
        )

    def remove_running(self, request: Request) -> bool:
        """Take a request out again; its tokens return to the budget. False if it was not in."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, None)
        if num_tokens is None:
            return False
        self.token_budget += num_tokens
        index = self.req_ids.index(request.request_id)
        for column in (
            self.requests,
            self.req_ids,
            self.new_block_ids,
            self.num_computed_tokens,
            self.num_output_tokens,
        ):
            del column[index]
        self.spec_tokens.pop(request.request_id, None)
        return True

    def build(
        self, total: int, finished_req_ids: set[str], preempted_req_ids: set[str]
    ) -> SchedulerOutput:
        """The finished plan; ``total`` tokens in all."""
        self.requests += self.new_requests
        self.num_scheduled_tokens |= self.num_new_tokens
        return SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self.req_ids,
                new_block_ids=self.new_block_ids,
                num_computed_tokens=self.num_computed_tokens,
                num_output_tokens=self.num_output_tokens,
            ),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=total,
            finished_req_ids=frozenset(finished_req_ids) if finished_req_ids else _NOBODY,
            preempted_req_ids=frozenset(preempted_req_ids) if preempted_req_ids else _NOBODY,
            scheduled_spec_decode_tokens=self.spec_tokens,
            has_structured_output_requests=self.has_structured_requests,
            pending_structured_output_tokens=self.awaits_grammar_tokens,
        )


def num_computed_before(scheduler_output: SchedulerOutput, request_id: str) -> int:
    """The request's computed tokens before this plan. For rare use: it searches."""
    for new in scheduler_output.scheduled_new_reqs:
        if new.request_id == request_id:
            return new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    return cached.num_computed_tokens[cached.req_ids.index(request_id)]
