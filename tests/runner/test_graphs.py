"""Graph modes: capture sizes, what counts as a decode, what is padded."""

from __future__ import annotations

import pytest

from twostep.runner.graphs import (
    BatchDescriptor,
    GraphDispatcher,
    GraphMode,
    choose_capture_sizes,
)

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL


def make(mode: GraphMode = GraphMode.FULL_AND_PIECEWISE, **options: object) -> GraphDispatcher:
    """A dispatcher with graphs of 1..16 tokens."""
    defaults: dict[str, object] = {"capture_sizes": [1, 2, 4, 8, 16], "max_num_seqs": 16}
    return GraphDispatcher(mode, **{**defaults, **options})  # type: ignore[arg-type]


def mode_of(graphs: GraphDispatcher, lens: list[int], computed: list[int]) -> GraphMode:
    """Mode of a batch given request by request."""
    return graphs.dispatch(
        sum(lens), len(lens), max_query_len=max(lens), min_num_computed=min(computed)
    ).mode


def test_largest_size_is_twice_the_decodes_within_the_budget() -> None:
    assert choose_capture_sizes(max_num_seqs=1, max_num_batched_tokens=2048) == (1, 2)
    assert choose_capture_sizes(max_num_seqs=20, max_num_batched_tokens=2048)[-1] == 40
    assert choose_capture_sizes(max_num_seqs=1024, max_num_batched_tokens=300)[-1] == 288
    big = choose_capture_sizes(
        max_num_seqs=1024, max_num_batched_tokens=8192, max_capture_size=1024
    )
    assert big[-2:] == (1008, 1024)


def test_all_running_requests_have_a_graph_of_their_size() -> None:
    sizes = choose_capture_sizes(max_num_seqs=101, max_num_batched_tokens=2048)
    assert 101 in sizes
    graphs = GraphDispatcher(FULL, capture_sizes=sizes, max_num_seqs=101)
    assert graphs.dispatch(101, 101, max_query_len=1, min_num_computed=1).num_reqs == 101


def test_drafts_add_multiples() -> None:
    sizes = choose_capture_sizes(max_num_seqs=5, max_num_batched_tokens=2048, num_spec_tokens=2)
    assert sizes == (1, 2, 3, 4, 6, 8, 12, 15, 16, 24)  # 15: five requests; largest 2 * 5 * 3 = 30
    graphs = make(capture_sizes=sizes, max_num_seqs=5, decode_query_len=3)
    # Two requests of 1 + 2 tokens: a graph of two requests. Four: of four, not of 5 1/3.
    assert graphs.dispatch(6, 2, max_query_len=3, min_num_computed=9) == BatchDescriptor(FULL, 6, 2)
    assert graphs.dispatch(12, 4, max_query_len=3, min_num_computed=9).num_reqs == 4
    # 6 tokens fit in 8, but a decode graph has whole requests.
    coarse = make(capture_sizes=[8, 9], max_num_seqs=5, decode_query_len=3)
    assert coarse.dispatch(6, 2, max_query_len=3, min_num_computed=9).num_tokens == 9
    # Without drafts they are no uniform decode of this device.
    assert graphs.dispatch(2, 2, max_query_len=1, min_num_computed=9).mode is PIECEWISE


def test_what_counts_as_a_uniform_decode() -> None:
    graphs = make()
    assert mode_of(graphs, [1, 1], [5, 900]) is FULL
    assert mode_of(graphs, [1, 1], [5, 1]) is FULL  # the last token of a prompt
    assert mode_of(graphs, [1, 1], [5, 0]) is PIECEWISE  # a prompt of one token has no context
    assert mode_of(graphs, [1, 2], [5, 5]) is PIECEWISE
    assert mode_of(graphs, [2, 2], [5, 5]) is PIECEWISE  # uniform, but not a decode's length


@pytest.mark.parametrize(
    ("mode", "decodes", "mixed"),
    [
        (GraphMode.NONE, NONE, NONE),
        (GraphMode.PIECEWISE, PIECEWISE, PIECEWISE),
        (GraphMode.FULL, FULL, FULL),
        (GraphMode.FULL_DECODE_ONLY, FULL, NONE),
        (GraphMode.FULL_AND_PIECEWISE, FULL, PIECEWISE),
    ],
)
@pytest.mark.parametrize("sizes", [[4, 8], None], ids=["captured", "any size"])
def test_modes(mode: GraphMode, decodes: GraphMode, mixed: GraphMode, sizes: list[int]) -> None:
    graphs = make(mode, capture_sizes=sizes)
    assert mode_of(graphs, [1, 1, 1], [5, 5, 5]) is decodes
    assert mode_of(graphs, [1, 1, 5], [5, 5, 5]) is mixed
    eager = make(mode, capture_sizes=sizes, enforce_eager=True)
    assert mode_of(eager, [1, 1, 1], [5, 5, 5]) is NONE


def test_padding() -> None:
    """FULL pads requests (as far as there can be any), PIECEWISE tokens, NONE nothing."""
    decodes = {"max_query_len": 1, "min_num_computed": 5}
    mixed = {"max_query_len": 4, "min_num_computed": 5}
    assert make().dispatch(3, 3, **decodes) == BatchDescriptor(FULL, 4, 4)
    assert make().dispatch(6, 3, **mixed) == BatchDescriptor(PIECEWISE, 8, 3)
    assert make().dispatch(17, 3, **mixed) == BatchDescriptor(NONE, 17, 3)
    assert make(FULL, max_num_seqs=5).dispatch(6, 3, **mixed) == BatchDescriptor(FULL, 8, 5)


def test_decode_graphs_end_at_the_number_of_requests() -> None:
    """A larger size is captured for mixed batches only."""
    graphs = make(max_num_seqs=3)  # nobody captured a decode of 3 requests
    assert graphs.dispatch(3, 3, max_query_len=1, min_num_computed=5).mode is PIECEWISE


def test_any_size_is_never_padded() -> None:
    """The CPU's recorded plan."""
    graphs = make(FULL, capture_sizes=None)
    for num_tokens in (1, 3, 513, 8192):
        found = graphs.dispatch(num_tokens, 1, max_query_len=num_tokens, min_num_computed=0)
        assert found == BatchDescriptor(FULL, num_tokens, 1)
