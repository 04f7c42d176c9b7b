"""The flat batch: the seed's numbers (conformance case 3), and the batch order."""

from __future__ import annotations

from twostep.runner.input_batch import build_input_batch, continue_decodes


def test_seed_batch() -> None:
    """B decodes its 42nd token; A runs its second chunk of 8,191 of 20,000 prompt tokens."""
    batch = build_input_batch(["A", "B"], [7, 3], [8191, 1], [8191, 540], [20000, 500])
    assert batch.req_ids == ["B", "A"]
    assert batch.rows == [3, 7]
    assert batch.num_tokens == 8192
    assert batch.query_start_loc == [0, 1, 8192]
    assert batch.positions.tolist() == [540, *range(8191, 16382)]
    assert batch.seq_lens == [541, 16382]
    assert batch.logits_indices == [0, 8191]
    assert batch.num_sampled == [1, 0]
    index, offset = batch.slot_mapping(16)
    assert (index[0], offset[0]) == (33, 12)
    assert (index[1], index[-1]) == (511, 1023)


def test_decodes_come_first_then_prefills_by_size() -> None:
    batch = build_input_batch(["P", "D", "Q", "E"], [0, 1, 2, 3], [100, 1, 7, 1], [0] * 4, [1] * 4)
    assert batch.req_ids == ["D", "E", "Q", "P"]


def test_the_last_chunk_of_a_prompt_samples() -> None:
    batch = build_input_batch(["A"], [0], [3618], [16382], [20000])
    assert batch.num_sampled == [1]


def test_a_decode_goes_on_as_if_packed_anew() -> None:
    first = build_input_batch(["A", "B"], [7, 3], [1, 1], [20, 9], [20, 4])
    packed = build_input_batch(["A", "B"], [7, 3], [1, 1], [21, 10], [20, 4])
    assert continue_decodes(first, [21, 10]) == packed
