"""Cases 9 and 70: which graph a batch replays on a device with 512 captured tokens."""

from __future__ import annotations

import pytest

from twostep.runner.graphs import (
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    choose_capture_sizes,
)

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
SIZES = choose_capture_sizes(max_num_seqs=1024, max_num_batched_tokens=8192)


def decode(num_reqs: int) -> BatchDescriptor:
    """Every request has one token and some context."""
    return dispatcher().dispatch(num_reqs, num_reqs, max_query_len=1, min_num_computed=7)


def mixed(num_tokens: int) -> BatchDescriptor:
    """One decode, one chunk of a prompt."""
    return dispatcher().dispatch(num_tokens, 2, max_query_len=num_tokens - 1, min_num_computed=0)


def dispatcher() -> GraphDispatcher:
    """The defaults of an H100."""
    return GraphDispatcher(GraphMode.FULL_AND_PIECEWISE, capture_sizes=SIZES, max_num_seqs=1024)


def test_case_09_step_k_is_eager_and_two_decodes_replay_one_graph() -> None:
    assert SIZES[-1] == 512
    assert mixed(8192) == BatchDescriptor(NONE, 8192, 2)
    assert decode(2) == BatchDescriptor(FULL, 2, 2)


def test_case_70_capture_list() -> None:
    """1, 2, 4; 8..248 by 8; 256..512 by 16."""
    assert len(SIZES) == 51
    assert (1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)) == SIZES


@pytest.mark.parametrize(
    ("num_reqs", "padded"), [(1, 1), (2, 2), (3, 4), (9, 16), (130, 136), (300, 304), (512, 512)]
)
def test_case_70_uniform_decodes_pad_requests(num_reqs: int, padded: int) -> None:
    assert decode(num_reqs) == BatchDescriptor(FULL, padded, padded)


def test_case_70_mixed_batches_pad_tokens_only() -> None:
    assert mixed(100) == BatchDescriptor(PIECEWISE, 104, 2)
    assert mixed(512) == BatchDescriptor(PIECEWISE, 512, 2)


def test_case_70_nothing_fits() -> None:
    assert decode(513) == BatchDescriptor(NONE, 513, 513)
    assert mixed(513) == BatchDescriptor(NONE, 513, 2)
