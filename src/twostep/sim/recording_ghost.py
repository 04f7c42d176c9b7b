"""A ghost that keeps all it was told, for tests that look at plans and batches."""

from __future__ import annotations

from typing import Any

import msgspec

from twostep.contracts.outputs import ModelRunnerOutput
from twostep.contracts.plan import GrammarOutput, SchedulerOutput
from twostep.sim.ghost import GhostExecutor, GhostFuture


class Flat(msgspec.Struct):
    """The flat batch of a step, as the runner would lay it out (decodes first)."""

    req_ids: list[str]
    query_start_loc: list[int]
    positions: list[int]
    seq_lens: list[int]
    input_ids: list[int]
    slots: list[int]
    logits_indices: list[int]
    num_sampled: list[int]


class RecordingGhost(GhostExecutor):
    """Keeps plans, calls and flat batches; the memory grows with the run."""

    def __init__(self, block_size: int, **options: Any) -> None:
        super().__init__(block_size, **options)
        self.plans: list[SchedulerOutput] = []
        self.batches: list[Flat] = []
        self.calls: list[str] = []

    def received(self, plan: SchedulerOutput, data: bytes) -> None:
        """Keep the plan."""
        self.plans.append(plan)
        self.calls.append("execute_model")

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> GhostFuture:
        """As ever, and noted."""
        self.calls.append("sample_tokens")
        return super().sample_tokens(grammar_output)

    def _forward(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super()._forward(plan)
        order = sorted(plan.num_scheduled_tokens.items(), key=lambda item: item[1])
        flat = Flat([], [0], [], [], [], [], [], [])
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for request_id, num_tokens in order:
            row = self.rows[request_id]
            positions = range(row.computed - num_tokens, row.computed)
            flat.req_ids.append(request_id)
            flat.query_start_loc.append(flat.query_start_loc[-1] + num_tokens)
            flat.positions += positions
            flat.seq_lens.append(row.computed)
            flat.input_ids += row.tokens[positions.start : positions.stop]
            flat.slots += [
                row.table[p // self.block_size] * self.block_size + p % self.block_size
                for p in positions
            ]
            flat.logits_indices.append(flat.query_start_loc[-1] - 1)
            flat.num_sampled.append(len(sampled[request_id]))
        self.batches.append(flat)
        return output
