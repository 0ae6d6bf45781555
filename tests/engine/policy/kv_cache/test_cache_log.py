"""Prefix cache events, applied in order, give the contents of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_cache.cache_log import MEDIA, CacheLog
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, pack_tokens, published_hash
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvscope_telemetry.kv_events.decoding import read_extra_keys
from kvscope_telemetry.ledger import Tier


def text(tokens: list[int], size: int = 2) -> list[Prefix]:
    """Return the prefixes of the full blocks of a text."""
    digests: list[bytes] = []
    PrefixIndex(size, b"test").extend(digests, tokens)
    parents = [b"", *digests]
    return [
        Prefix(digest, i * size, pack_tokens(tokens[i * size : i * size + size]), parents[i])
        for i, digest in enumerate(digests)
    ]


def test_consecutive_blocks_of_a_text_are_stored_in_one_kv_cache_event() -> None:
    log, first, second = CacheLog(2), text([1, 2, 3, 4, 5, 6]), text([7, 8, 9, 10])
    for prefix in (*first[:2], *second, first[2]):
        log.record_stored(prefix)
    hashes = {prefix: published_hash(prefix.digest) for prefix in (*first, *second)}
    assert log.drain() == [
        BlockStored((hashes[first[0]], hashes[first[1]]), None, (1, 2, 3, 4), 2, medium="GPU"),
        BlockStored((hashes[second[0]], hashes[second[1]]), None, (7, 8, 9, 10), 2, medium="GPU"),
        BlockStored((hashes[first[2]],), hashes[first[1]], (5, 6), 2, medium="GPU"),
    ]
    assert log.drain() == []


def test_cache_salt_is_in_the_kv_event_of_the_first_block_of_a_text_only() -> None:
    log, (first, *rest) = CacheLog(2), text([1, 2, 3, 4, 5, 6])
    for prefix in (Prefix(first.digest, 0, first.tokens, salt="mine"), *rest):
        log.record_stored(prefix)
    log.record_cleared()
    log.record_stored(rest[0])
    stored, _, later = log.drain()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys is not None
    assert read_extra_keys(stored.extra_keys) == (("mine",), None, None)
    assert isinstance(later, BlockStored)
    assert later.extra_keys is None


def test_adapter_is_reported_for_every_block() -> None:
    log, (first, second, _) = CacheLog(2), text([1, 2, 3, 4, 5, 6])
    log.record_stored(Prefix(first.digest, 0, first.tokens, salt="mine", adapter="sql", adapter_key=b"k" * 32))
    log.record_stored(Prefix(second.digest, 2, second.tokens, first.digest, adapter="sql"))
    (stored,) = log.drain()
    assert isinstance(stored, BlockStored)
    assert stored.lora_name == "sql"
    assert read_extra_keys(stored.extra_keys or b"") == (("sql", "mine"), ("sql",))


def test_kv_cache_events_keep_the_order_in_which_they_happened() -> None:
    log, (first, second) = CacheLog(2), text([1, 2, 3, 4])
    log.record_stored(first)
    log.record_removed([first])
    log.record_removed([])
    log.record_stored(second, Tier.HOST)
    log.record_cleared()
    kinds = [type(event) for event in log.drain()]
    assert kinds == [BlockStored, BlockRemoved, BlockStored, AllBlocksCleared]


@given(
    st.lists(st.tuples(st.sampled_from(["submit", "step", "step", "step", "reset"]), st.integers(0, 5)), max_size=60),
    st.sampled_from([(0, 0), (6, 0), (6, 8)]),
)
def test_kv_cache_events_applied_in_order_reproduce_the_prefix_cache(
    drive: Callable[..., Any], actions: list[tuple[str, int]], lower: tuple[int, int]
) -> None:
    driven = drive(num_blocks=10, num_host=lower[0], num_disk=lower[1], preemption="auto")
    driven.pool.cache_log = CacheLog(driven.pool.block_size)
    cached: set[tuple[str, int]] = set()
    for action, which in actions:
        if action == "submit":
            driven.submit([which] * 4 + list(range(which, which + 9)), 6)
        elif action == "reset":
            driven.scheduler.reset_prefix_cache(driven.now_ns)
        else:
            driven.step()
        _apply(driven.pool.cache_log.drain(), cached)
        assert cached == _held(driven.pool)


def _apply(events: list[KvEvent], cached: set[tuple[str, int]]) -> None:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            cached.clear()
            continue
        assert event.medium is not None
        each = {(event.medium, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockStored):
            assert not each & cached, "stored twice"
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            cached |= each
        else:
            cached -= each


def _held(pool: BlockPool) -> set[tuple[str, int]]:
    """Return the cached hashes and tiers according to the ledger."""
    ledger = pool.ledger
    rows = zip(ledger.tier.tolist(), ledger.hash.tolist(), strict=True)
    return {(MEDIA[Tier(tier)], block_hash) for tier, block_hash in rows if block_hash}


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.DISK])
def test_kv_cache_event_names_the_storage_medium_of_each_tier(tier: Tier) -> None:
    log, (prefix,) = CacheLog(2), text([1, 2])
    log.record_stored(prefix, tier)
    (event,) = log.drain()
    assert isinstance(event, BlockStored)
    assert event.medium == {Tier.HBM: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}[tier]
