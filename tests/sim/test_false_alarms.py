"""Runs in which a check cried although no rule was broken, shrunk."""

from __future__ import annotations

from twostep.sim.case import Add, Case, CaseConfig
from twostep.sim.simulation import run_case


def test_seed_2279_a_request_needs_what_the_budget_at_its_turn_lets_it_need() -> None:
    """Four tokens need a block, and none is free; of the three tokens of budget that others left
    over, it could have run all into the block it holds."""
    text = (32, 39, 46, 53, 60, 6)
    case = Case(
        config=CaseConfig(
            num_blocks=22,
            block_size=8,
            max_num_seqs=39,
            budget=21,
            max_model_len=32,
            num_spec_tokens=3,
            long_prefill_threshold=5,
        ),
        events=(
            Add(
                step=1002,
                request_id="r1017",
                length=4,
                tail=(60, 6, 13, 20, 27, 34, 41),
                max_tokens=9,
                grammar=2,
                grammar_seconds=0.02,
            ),
            Add(step=1028, request_id="r1043", length=15, max_tokens=11, salt=2),
            Add(step=1029, request_id="r1044", length=8, text=1, max_tokens=12),
            Add(step=1030, request_id="r1045", length=15, max_tokens=9),
            Add(step=1032, request_id="r1047", length=2, max_tokens=9),
            Add(step=1033, request_id="r1048", length=2, fault="execute", fault_at=2),
            Add(step=1034, request_id="r1039", length=10, tail=text, max_tokens=2, salt=1),
            Add(step=1034, request_id="r1050", length=17, max_tokens=2, salt=2, grammar=5),
            Add(step=1034, request_id="r1051", length=10, tail=text, max_tokens=2, salt=1),
            Add(step=1034, request_id="r1052", length=17),
            Add(step=1034, request_id="r1055", length=9, max_tokens=2),
        ),
        steps=1035,
    )
    assert run_case(case).violation is None


def test_seed_2834_a_request_that_is_alone_needs_more_than_the_threshold_of_long_prompts() -> None:
    """Six tokens need six blocks; five are free, the others come back with the step in flight of
    the request that has just ended. With company the threshold would have let it need five."""
    case = Case(
        config=CaseConfig(
            num_blocks=119,
            block_size=1,
            max_num_seqs=2,
            budget=16,
            max_model_len=100,
            caching=False,
            long_prefill_threshold=5,
        ),
        events=(
            Add(
                step=0,
                request_id="r39",
                length=53,
                max_tokens=16,
                stops=(5, 3, 17),
                salt=1,
                grammar=5,
            ),
            Add(step=10, request_id="r40", length=51, fault_at=46),
        ),
        steps=11,
    )
    assert run_case(case).violation is None
