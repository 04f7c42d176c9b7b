"""Cases 37-45: the KV cache planner."""

from __future__ import annotations

import pytest
from planning_helpers import add, check, make_scheduler, run_step, sample_all

from twostep.config.engine import CacheConfig
from twostep.kv_cache.block_hash import extend_block_hashes, hash_block_tokens, token_array
from twostep.kv_cache.block_pool import BlockPool
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.kv_cache.sizing import kv_block_bytes, size_kv_cache
from twostep.scheduler.request import RequestStatus


@pytest.mark.parametrize(("length", "hit"), [(48, 47), (49, 48), (15, 0)])
def test_case_37_hits(length: int, hit: int) -> None:
    """At least one token is computed. Ours: of 48 cached tokens 47 are used, not 32.

    The last token's KV is in a block that others share: it is computed for its logits and not
    written again, so nothing has to be copied and no whole block is recomputed.
    """
    scheduler = make_scheduler()
    prompt = list(range(length))
    add(scheduler, "first", prompt, 1)
    run_step(scheduler)
    add(scheduler, "second", prompt, 1)
    plan, outputs = run_step(scheduler)
    new = plan.scheduled_new_reqs[0]
    assert new.num_computed_tokens == hit
    assert new.num_cached_tokens == length // 16 * 16
    assert plan.num_scheduled_tokens == {"second": length - hit}
    stats = outputs["second"].prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (length, hit)


def test_case_37_drafters_recompute_the_last_block() -> None:
    """49 tokens hit 32."""
    scheduler = make_scheduler()
    scheduler.kv_cache_manager._drop_last_hit_block = True
    for name in ("first", "second"):
        add(scheduler, name, list(range(49)), 1)
        plan, _ = run_step(scheduler)
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 32


def test_case_38_free_order() -> None:
    """Unhashed blocks come back first, hashed ones last, the tail of a request before its head."""
    pool = BlockPool(9)
    blocks = pool.get_new_blocks(6)
    one, two, three = blocks[:3]
    pool.cache_blocks([one, two], [b"1", b"2"])
    assert pool.free_order() == [7, 8]
    pool.free_blocks([three, two, one])
    assert pool.free_order() == [3, 7, 8, 2, 1]
    assert pool.get_new_blocks(4) == [3, 7, 8, 2]
    assert pool.cached == {b"1": one}


def test_case_39_a_hit_leaves_the_free_queue() -> None:
    """Only then does usage count it."""
    pool = BlockPool(5)
    (block_id,) = pool.get_new_blocks(1)
    pool.cache_blocks([block_id], [b"h"])
    pool.free_blocks([block_id])
    assert pool.usage == 0.0
    assert pool.cached[b"h"] == block_id
    assert pool.usage == 0.0
    pool.touch([block_id])
    assert pool.num_holders(block_id) == 1
    assert block_id not in pool.free_order()
    assert pool.usage == 0.25


def test_case_40_hash_chain() -> None:
    """A token changes its block and all later ones; a salt or an adapter changes everything."""

    def hashes(tokens: list[int], salt: str | None = None) -> list[bytes]:
        found: list[bytes] = []
        extend_block_hashes(found, token_array(tokens), 16, salt)
        return found

    tokens = list(range(48))
    plain = hashes(tokens)
    changed = hashes([*tokens[:20], 999, *tokens[21:]])
    assert changed[0] == plain[0]
    assert changed[1] != plain[1]
    assert changed[2] != plain[2]
    salted = hashes(tokens, "tenant")
    assert not set(salted) & set(plain)
    assert not set(hashes(tokens, "other")) & set(salted)
    assert hash_block_tokens(None, tokens[:16], ("lora",)) != plain[0]
    assert hash_block_tokens(plain[0], tokens[16:32], ("lora",)) != plain[1]
    assert hash_block_tokens(plain[0], tokens[16:32]) == plain[1]


def test_case_40_same_content_twice() -> None:
    """Two requests computed it at the same time: two blocks, one answer, always the first one."""
    pool = BlockPool(5)
    one, two = pool.get_new_blocks(2)
    assert pool.cache_blocks([one], [b"h"]) == [one]
    assert pool.cache_blocks([two], [b"h"]) == []
    assert pool.cached == {b"h": one}


def test_case_41_usage() -> None:
    """Cached blocks that nobody holds are free, and can still be found."""
    scheduler = make_scheduler(num_blocks=11)
    add(scheduler, "a", list(range(9 * 16)), 5)
    plan = scheduler.schedule()
    assert scheduler.kv_cache_manager.pool.usage == pytest.approx(0.9)
    scheduler.update_from_output(plan, sample_all(scheduler, plan))
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.pool.usage == 0.0
    add(scheduler, "b", list(range(9 * 16)), 5)
    plan, _ = run_step(scheduler)
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 9 * 16 - 1


def test_case_42_reset_prefix_cache() -> None:
    """Refused while a request runs, unless running requests are reset too."""
    scheduler = make_scheduler()
    prompt = list(range(40))
    add(scheduler, "a", prompt, 50)
    run_step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert len(scheduler.kv_cache_manager.pool.cached) == 2
    assert len(scheduler.running) == 1
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.kv_cache_manager.pool.cached == {}
    plan, _ = run_step(scheduler)
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 0
    check(scheduler)


def test_case_43_sliding_window() -> None:
    """Window 64, block 16: 208 computed tokens leave 9 blocks behind; a hit needs 4 in a row.

    Ours: they are given back when the next block is taken, not at each token (8 at 200).
    """
    scheduler = make_scheduler(window=64)
    request = add(scheduler, "a", list(range(200)), 50)
    run_step(scheduler)
    for _ in range(9):  # blocks are given back when the next one is taken: at 208 tokens
        run_step(scheduler)
    table = scheduler.kv_cache_manager.get_block_ids("a")
    assert request.num_computed_tokens == 209
    assert table[:9] == [0] * 9
    assert 0 not in table[9:]
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 9_999 - 5
    pool = scheduler.kv_cache_manager.pool
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)

    again = scheduler.make_request(request_like(request))
    hits, num_hit = scheduler.kv_cache_manager.get_computed_blocks(again)
    assert [b == 0 for b in hits] == [True] * 8 + [False] * 4
    assert num_hit == 12 * 16
    pool.evict(hits[9])  # block 9 is gone: 10, 11 are too short a run; 5..8 are complete
    hits, _ = scheduler.kv_cache_manager.get_computed_blocks(again)
    assert [b == 0 for b in hits] == [True] * 5 + [False] * 4
    for block_hash in again.block_hashes[3:9]:
        pool.evict(pool.cached[block_hash])
    hits, _ = scheduler.kv_cache_manager.get_computed_blocks(again)
    assert [b == 0 for b in hits] == [False] * 3  # from the start, nothing is missing


def request_like(request):  # type: ignore[no-untyped-def]
    """The same prompt under another id."""
    from planning_helpers import make_engine_request

    return make_engine_request("again", request.all_token_ids[:200].tolist(), 5)


def test_case_44_sizing() -> None:
    """Llama-3.1-8B in bf16: 2 MiB a block; 40 GiB are 20,480 blocks, 2.5 long requests."""
    block_bytes = kv_block_bytes(
        block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2
    )
    assert block_bytes == 2 << 20
    sizing = size_kv_cache(
        block_bytes=block_bytes,
        block_size=16,
        available_bytes=40 << 30,
        max_model_len=131_072,
        max_num_seqs=1024,
    )
    assert sizing.num_blocks == 20_480
    assert sizing.total_bytes == 40 << 30
    assert sizing.max_concurrency == pytest.approx(2.5, abs=1e-3)
    assert sizing.reason == "all that fits in 40.0 GiB"


def test_case_45_blocks_to_take() -> None:
    """Revived hits count, and a refusal leaves everything as it was."""
    manager = KVCacheManager(
        CacheConfig(num_blocks=11), max_model_len=4096, max_in_flight_tokens=4096
    )
    scheduler = make_scheduler(num_blocks=11)
    scheduler.kv_cache_manager = manager
    decoding = add(scheduler, "decoding", 32, 5)
    run_step(scheduler)
    assert decoding.num_computed_tokens == 32
    assert manager.blocks_to_take(decoding, 33) == 1
    scheduler.finish_requests(["decoding"], RequestStatus.FINISHED_ABORTED)
    manager.reset_prefix_cache()

    shared = list(range(64))
    short = add(scheduler, "short", shared[:17], 5)
    long = add(scheduler, "long", [*shared, 5, 6], 5)
    run_step(scheduler)
    scheduler.finish_requests(["long"], RequestStatus.FINISHED_ABORTED)
    assert short.num_computed_tokens == 17
    again = scheduler.make_request(request_like_tokens([*shared, *range(500, 532)]))
    hits, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 64
    assert [b in manager.pool.reusable for b in hits] == [False, True, True, True]
    assert manager.blocks_to_take(again, 96, hits) == 5
    taken = manager.pool.get_new_blocks(manager.pool.num_free_blocks - 4)
    assert [b in manager.pool.reusable for b in hits] == [False, True, True, True]
    before = (manager.pool.free_order(), dict(manager.pool.extra_refs))
    assert not manager.allocate_first_slots(again, 96, 99, hits)
    assert (manager.pool.free_order(), dict(manager.pool.extra_refs)) == before
    assert manager.pool.num_free_blocks == 4
    manager.pool.free_blocks(taken)
    assert manager.allocate_first_slots(again, 96, 99, hits)
    assert long.status is RequestStatus.FINISHED_ABORTED


def request_like_tokens(tokens: list[int]):  # type: ignore[no-untyped-def]
    """A request with this prompt."""
    from planning_helpers import make_engine_request

    return make_engine_request("again", tokens, 5)
