"""The history of evicted blocks: the newest, within a bound."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from kvscope_engine.policy.prefixes import prefix_history
from kvscope_engine.policy.prefixes.prefix_history import MAX_EVICTED_DIGESTS, PrefixHistory
from kvscope_engine.policy.prefixes.prefix_index import Prefix


def prefix(number: int) -> Prefix:
    return Prefix(digest=hashlib.sha256(number.to_bytes(8, "little")).digest(), start=0, tokens=b"", parent=b"root")


def is_remembered(history: PrefixHistory, number: int) -> bool:
    return history.explain(prefix(number)).kind == "evicted"


def test_oldest_evicted_prefixes_are_forgotten_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_history, "MAX_EVICTED_DIGESTS", 16)
    monkeypatch.setattr(prefix_history, "EVICTED_BATCH", 4)
    history = PrefixHistory()
    for number in range(16):
        history.record_lost([prefix(number)], step=number)
    assert all(is_remembered(history, number) for number in range(16))
    history.record_lost([prefix(16)], step=16)
    assert [number for number in range(17) if is_remembered(history, number)] == list(range(4, 17))
    history.record_lost(map(prefix, range(100, 200)), step=17)
    assert is_remembered(history, 199)
    assert sum(is_remembered(history, number) for number in range(200)) <= 16


def test_block_cached_again_is_no_longer_evicted() -> None:
    history = PrefixHistory()
    history.record_lost([prefix(1)], step=5)
    history.record_cached(prefix(1))
    assert not is_remembered(history, 1)


def test_history_of_evicted_prefixes_is_bounded_in_bytes() -> None:
    history = PrefixHistory()
    tracemalloc.start()
    try:
        for number in range(MAX_EVICTED_DIGESTS + MAX_EVICTED_DIGESTS // 2):
            history.record_lost([prefix(number)], step=number)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 12 << 20
    assert peak < 17 << 20


def first(digest: bytes, token: int, salt: str = "", adapter_key: bytes = b"") -> Prefix:
    return Prefix(digest * 32, 0, bytes([token, 0, 0, 0]), salt=salt, adapter_key=adapter_key)


def test_same_text_with_another_salt_or_adapter_is_explained() -> None:
    history = PrefixHistory()
    cached = first(b"a", 1, "mine")
    history.record_cached(cached)
    assert history.explain(first(b"b", 2, "mine")).kind == "differs"
    assert history.explain(first(b"b", 1)).kind == "salt"
    assert history.explain(first(b"b", 1, "mine", b"key")).kind == "adapter"
    assert history.explain(first(b"b", 2)).kind == history.explain(first(b"b", 2, "mine", b"key")).kind == "new"
    history.record_lost([cached], 3)
    assert history.explain(first(b"b", 2, "mine")).kind == history.explain(first(b"b", 1)).kind == "new"
