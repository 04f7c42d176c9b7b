"""The native sampler against the NumPy one, and its promises: same request, same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from twostep.sampler.reference import sample_row
from twostep.sampler.row_params import RowParams

pytestmark = pytest.mark.native

# Where u or top_p falls this close to a boundary, rounding may decide.
MARGIN = 1e-6


def f32(values):
    return np.array(values, dtype=np.float32)


def expect(sampled, logits, cases, masks=None):
    """Every token as the reference draws it; returns how many were too close to call."""
    close = 0
    for m, (token, x, c) in enumerate(zip(sampled.tokens(), logits, cases, strict=True)):
        expected = sample_row(x, c.params, c.history, None if masks is None else masks[m])
        if token != expected.token:
            assert expected.margin < MARGIN, (m, token, expected, c.params)
            close += 1
    return close


@pytest.mark.parametrize(
    ("vocab", "batches"), [(1, 1), (5, 4), (17, 6), (64, 4), (257, 10), (1003, 20), (9001, 3)]
)
def test_draws_what_the_reference_draws(make_sampler, random_batch, vocab, batches):
    rng = np.random.default_rng(vocab)
    sampler = make_sampler(vocab)
    close = 0
    for _ in range(batches):
        logits, cases = random_batch(rng, vocab, 64)
        sampled = sampler.run(logits, cases)
        failed = [m for m, _ in sampled.failed()]  # the bans of a tiny vocabulary leave nothing
        assert len(failed) < 48
        ok = [m for m in range(64) if m not in failed]
        for m in failed:
            with pytest.raises(ValueError, match="no token is left"):
                sample_row(logits[m], cases[m].params, cases[m].history)
        tokens = sampled.tokens()
        for m in ok:
            expected = sample_row(logits[m], cases[m].params, cases[m].history)
            if tokens[m] != expected.token:
                assert expected.margin < MARGIN, (m, tokens[m], expected, cases[m].params)
                close += 1
    assert close <= 2


@pytest.mark.parametrize("top", [{"top_k": 40}, {"top_k": 3000}, {"top_p": 0.95}, {"top_p": 0.5}])
def test_large_vocabulary(make_sampler, case, top):
    rng = np.random.default_rng(1)
    vocab = 49155
    sampler = make_sampler(vocab)
    cases = [
        case(RowParams(prompt_len=1, seed=s, temperature=0.7 + 0.1 * (s % 8), **top), [0])
        for s in range(16)
    ]
    logits = rng.standard_normal((16, vocab)).astype(np.float32) * f32([1, 4] * 8)[:, None]
    assert expect(sampler.run(logits, cases), logits, cases) <= 1


def test_many_equal_logits(make_sampler, case):
    """All alike: selection cannot tell values apart and must go by id."""
    sampler = make_sampler(5000)
    rows = [{"top_p": 0.3}, {"top_p": 0.3, "top_k": 7}, {"top_k": 7}, {"min_p": 1.0}, {}]
    cases = [
        case(RowParams(prompt_len=1, seed=9, temperature=1.0, **kw), [0] * n)
        for kw in rows
        for n in range(1, 9)
    ]
    logits = np.full((len(cases), 5000), 2.5, dtype=np.float32)
    sampled = sampler.run(logits, cases)
    assert expect(sampled, logits, cases) == 0
    assert max(sampled.tokens()[:8]) < 1500


def test_a_narrow_crowd_below_an_outlier(make_sampler, case):
    """One value far above thousands that lie close together: one bucket holds nearly all."""
    rng = np.random.default_rng(3)
    logits = np.repeat((rng.random((1, 6000)) * 1e-3).astype(np.float32), 24, axis=0)
    logits[:, 17] = 8.0
    cases = [
        case(RowParams(prompt_len=1, seed=s, temperature=1.0, top_p=p), [0])
        for s in range(8)
        for p in (0.35, 0.6, 0.9)
    ]
    assert expect(make_sampler(6000).run(logits, cases), logits, cases) == 0


def test_grammar_masks_the_rows_it_names(make_sampler, random_batch):
    rng = np.random.default_rng(5)
    vocab, rows = 301, 32
    logits, cases = random_batch(rng, vocab, rows)
    for c in cases:
        assert c.row == -1
    masks = np.ones((rows, vocab), dtype=bool)
    named = [3, 30, 8, 0]
    masks[named] = rng.random((4, vocab)) < 0.3
    bits = np.zeros((4, 320), dtype=bool)
    bits[:, :vocab] = masks[named]
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    sampler = make_sampler(vocab)
    sampled = sampler.run(logits, cases, (np.array(named, dtype=np.int32), words))
    tokens = sampled.tokens()
    for m in set(range(rows)) - {m for m, _ in sampled.failed()}:
        expected = sample_row(logits[m], cases[m].params, cases[m].history, masks[m])
        assert tokens[m] == expected.token or expected.margin < MARGIN


def test_grammar_that_leaves_only_stops_lifts_min_tokens(make_sampler, case):
    words = np.array([[0b0110]], dtype=np.int32)
    sampler = make_sampler(4)
    c = case(RowParams(prompt_len=1, min_tokens=5, stop_ids=[1, 2]), [0])
    sampled = sampler.run(f32([[9, 1, 2, 9]]), [c], (np.array([0], dtype=np.int32), words))
    assert sampled.tokens() == [2]


@pytest.mark.parametrize(
    ("history", "token"),
    [
        ([0, 4, 5], 7),  # the output ends in 4 5: no 6
        ([4, 5], 6),  # the 4 belongs to the prompt
        ([4], 6),
        ([0, 4, 5, 4], 6),
    ],
)
def test_bad_words_look_at_the_output_only(make_sampler, case, history, token):
    c = case(RowParams(prompt_len=1, bad_words=[[4, 5, 6], [2]]), history)
    sampled = make_sampler(8).run(f32([[0, 0, 9, 0, 0, 0, 5, 4]]), [c])
    assert sampled.tokens() == [token]


def test_alone_and_among_strangers(make_sampler, random_batch):
    """Tokens and log-probabilities: same bits for every batch, order, row and thread count."""
    rng = np.random.default_rng(7)
    vocab = 2051
    logits, cases = random_batch(rng, vocab, 64)
    batch = make_sampler(vocab).run(logits, cases)
    order = rng.permutation(64)
    shuffled = make_sampler(vocab, threads=2).run(logits[order], [cases[m] for m in order])
    single = make_sampler(vocab)
    assert [batch.tokens()[m] for m in order] == shuffled.tokens()
    for at, m in enumerate(order):
        cases[m].row = int(at)
        alone = single.run(logits[m : m + 1], [cases[m]])
        assert alone.tokens() == [batch.tokens()[m]]
        for other in (alone.logprobs(0), shuffled.logprobs(at)):
            mine = batch.logprobs(int(m))
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mine[0].tobytes() == other[0].tobytes()
                assert mine[1].tobytes() == other[1].tobytes()
                assert mine[2] == other[2]


def test_every_instruction_set_draws_the_same_bits(make_sampler, random_batch):
    rng = np.random.default_rng(11)
    logits, cases = random_batch(rng, 1501, 64)
    sampled = make_sampler(1501).run(logits, cases)
    from twostep import _native

    for isa in _native.cpu_info()["isas"]:
        other = type(make_sampler(1))(isa, 1501).run(logits, cases)
        assert other.tokens() == sampled.tokens()
        for m in range(64):
            a, b = sampled.logprobs(m), other.logprobs(m)
            assert (a is None) == (b is None)
            assert a is None or (a[1].tobytes() == b[1].tobytes() and a[2] == b[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_a_broken_row_fails_alone(make_sampler, case, temperature):
    rng = np.random.default_rng(13)
    vocab = 130
    logits = rng.standard_normal((8, vocab)).astype(np.float32)
    params = RowParams(prompt_len=1, seed=4, temperature=temperature, num_logprobs=2)
    cases = [case(params, [1, 2]) for _ in range(8)]
    healthy = make_sampler(vocab).run(logits, cases).tokens()
    logits[1, 129], logits[3, 0], logits[5, 64], logits[6] = np.nan, np.inf, -np.inf, -np.inf
    sampler = make_sampler(vocab)
    sampled = sampler.run(logits, cases)
    failed = dict(sampled.failed())
    assert sorted(failed) == [1, 3, 6]
    assert "NaN" in failed[1]
    assert "no token is left" in failed[6]
    tokens = sampled.tokens()
    for m in range(8):
        if m in failed:
            assert tokens[m] == -1
            assert sampled.logprobs(m) is None
            assert sampler.table.row(m, 4) == [1, 2, 0, 0]  # nothing was written
        elif m != 5:
            assert tokens[m] == healthy[m]
            assert sampler.table.row(m, 3) == [1, 2, tokens[m]]


def test_a_nan_behind_a_mask_still_fails_the_row(make_sampler, case):
    c = case(RowParams(prompt_len=1, allowed_ids=[0]), [0])
    sampled = make_sampler(40).run(f32([[1] * 39 + [np.nan]]), [c])
    assert [m for m, _ in sampled.failed()] == [0]


def test_overflow_by_temperature_fails_the_row(make_sampler, case):
    c = case(RowParams(prompt_len=1, temperature=0.01), [0])
    assert make_sampler(4).run(f32([[3e38, 0, 0, 0]]), [c]).failed()


def test_steps_in_flight_feed_each_other(make_sampler, case):
    """Eight steps are queued before the first result is read; each sees all tokens before it."""
    vocab, logits = 50, np.zeros(50, dtype=np.float32)
    logits[:6] = [3, 2.9, 2.5, 2.4, 2.0, 1.5]
    params = RowParams(
        prompt_len=2, seed=1, temperature=0.7, top_k=6, frequency_penalty=0.6,
        bad_words=[[0, 1], [2, 0, 3]],
    )  # fmt: skip
    history = [0, 9]
    sampler = make_sampler(vocab, rows=2)
    sampler.set_logits([logits])
    steps, tickets = [], []
    for n in range(8):
        step = sampler.step([2 + n], [1])
        if n == 0:
            sampler.stage(step, 1, case(params, history))
        steps.append(sampler.native.SampleStep(step))
        tickets.append(sampler.launch(step))
    sampler.stream.wait(tickets[-1])
    for sampled in steps:
        history.append(sample_row(logits, params, history).token)
        assert sampled.tokens() == history[-1:]
    assert sampler.table.row(1, 10) == history


def test_a_row_changes_hands_while_its_step_is_in_flight(make_sampler, case):
    first = case(RowParams(prompt_len=1, allowed_ids=[3]), [0])
    second = case(RowParams(prompt_len=3, allowed_ids=[4]), [7, 8, 9])
    sampler = make_sampler(10, rows=1)
    sampler.set_logits(np.zeros((1, 10), dtype=np.float32))
    results = []
    for c in (first, second):
        step = sampler.step([len(c.history)], [0])
        sampler.stage(step, 0, c)
        results.append(sampler.native.SampleStep(step))
        ticket = sampler.launch(step)
    sampler.stream.wait(ticket)
    assert [r.tokens() for r in results] == [[3], [4]]
    assert sampler.table.row(0, 4) == [7, 8, 9, 4]


def test_resumed_requests_remember_their_outputs(make_sampler, case):
    """Preempted after 5 outputs and staged anew in another row: the same tokens follow."""
    rng = np.random.default_rng(17)
    logits = rng.standard_normal((12, 200)).astype(np.float32)
    params = RowParams(
        prompt_len=3, seed=5, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.2, min_tokens=8, stop_ids=[1, 2],
    )  # fmt: skip
    sampler = make_sampler(200, rows=3)

    def generate(row, history, count):
        for n in range(count):
            step = sampler.step([len(history)], [row])
            if n == 0:
                sampler.stage(step, row, case(params, history))
            sampled = sampler.native.SampleStep(step)
            sampler.set_logits([logits[len(history) - 3]])
            sampler.stream.wait(sampler.launch(step))
            history = history + sampled.tokens()
        return history

    whole = generate(0, [10, 11, 12], 12)
    assert generate(2, whole[:8], 7) == whole
    # The penalties matter: without them the tokens are others.
    assert len(set(whole[3:])) > 6


def test_seeds_differ(make_sampler, case):
    cases = [case(RowParams(prompt_len=1, seed=s, temperature=1.0), [0]) for s in range(64)]
    tokens = make_sampler(100_000).run(np.zeros((64, 100_000), dtype=np.float32), cases).tokens()
    assert len(set(tokens)) > 60


def test_a_token_beyond_the_table_is_returned_but_not_stored(make_sampler, case):
    sampler = make_sampler(4, rows=2, max_len=3)
    cases = [case(RowParams(prompt_len=1), [0, 0, 0]), case(RowParams(prompt_len=1), [2])]
    assert sampler.run(f32([[0, 0, 0, 1]] * 2), cases).tokens() == [3, 3]
    assert sampler.table.row(1, 3) == [2, 3, 0]


def chi_square(counts, expected):
    return float(np.sum((counts - expected) ** 2 / expected))


@pytest.mark.parametrize("top", [{}, {"top_k": 30}, {"top_p": 0.9}])
def test_draws_follow_the_distribution(make_sampler, case, top):
    """1e5 draws over 1000 seeds and 100 positions, singly and as pairs of neighbours."""
    from twostep.sampler.reference import probabilities, process_logits

    rng = np.random.default_rng(19)
    logits = (rng.standard_normal(50) * 1.2).astype(np.float32)
    params = RowParams(prompt_len=1, temperature=0.9, **top)
    probs, _ = probabilities(process_logits(logits, params, [0]), params)
    sampler = make_sampler(50, rows=1000, max_len=128)
    sampler.set_logits(np.repeat(logits[None], 1000, axis=0))
    draws = []
    for n in range(100):
        step = sampler.step([1 + n] * 1000, range(1000))
        for row in range(1000 if n == 0 else 0):
            one = RowParams(prompt_len=1, temperature=0.9, seed=row, **top)
            sampler.stage(step, row, case(one, [0]))
        sampled = sampler.native.SampleStep(step)
        sampler.stream.wait(sampler.launch(step))
        draws.append(sampled.tokens())
    tokens = np.array(draws)
    kept = probs > 0
    counts = np.bincount(tokens.ravel(), minlength=50)
    assert counts[~kept].sum() == 0
    df = int(kept.sum()) - 1
    assert chi_square(counts[kept], 1e5 * probs[kept]) < df + 3.5 * np.sqrt(2 * df)
    # Neighbouring positions are independent: the most likely token against the others.
    top_token = int(np.argmax(probs))
    p = probs[top_token]
    pairs = (tokens[:-1] == top_token) * 2 + (tokens[1:] == top_token)
    pair_counts = np.bincount(pairs.ravel(), minlength=4)
    expected = pairs.size * np.array([(1 - p) ** 2, (1 - p) * p, p * (1 - p), p * p])
    assert chi_square(pair_counts, expected) < 20
