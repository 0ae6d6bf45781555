"""Explains why a prompt did not find a longer prefix in the cache: which blocks were evicted, and where the prompt
differs from cached texts.

Owns a bounded record of evicted digests and, for each cached block, the blocks that follow it in texts. It only
explains the result of `find_reusable` and does not affect it.

After the first minutes of steady load, no other data of the engine keeps growing: each block that is evicted for the
first time adds a digest, up to `MAX_EVICTED_DIGESTS`, which take 11 MiB, and 16 MiB while their table grows. Following
blocks are recorded only for cached blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvscope_engine.policy.prefixes.prefix_index import Prefix

MAX_EVICTED_DIGESTS: Final = 1 << 16
"""Maximum number of evicted digests that are recorded; the oldest are dropped. Each takes about 170 bytes,
including the dictionary's entry.
"""
EVICTED_BATCH: Final = MAX_EVICTED_DIGESTS // 8
"""Number of oldest digests that are dropped together.

Finding a dictionary's first entry is slow once many entries before it have been removed.
"""
MAX_SIBLINGS: Final = 8
"""Maximum number of cached texts that a prompt is compared with."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Reason why a block is not cached. Fields correspond to `missed`, `missed_token` and `missed_step` of
    `EventData`.
    """

    kind: str = ""
    token: int = 0
    step: int = 0


class PrefixHistory:
    """Explains cache misses from the records of blocks that entered the cache or left the last tier."""

    def __init__(self) -> None:
        self._evicted: dict[bytes, int] = {}  # digest -> step, the oldest first
        self._following: dict[bytes, dict[bytes, bytes]] = {}  # digest of a block -> digest and tokens of the next ones
        self._first: dict[bytes, dict[bytes, bytes]] = {}  # tokens of a first block -> digests and keys of adapters

    def record_cached(self, prefix: Prefix) -> None:
        self._evicted.pop(prefix.digest, None)
        self._following.setdefault(prefix.predecessor_key, {})[prefix.digest] = prefix.tokens
        if not prefix.parent:
            self._first.setdefault(prefix.tokens, {})[prefix.digest] = prefix.adapter_key

    def record_lost(self, prefixes: Iterable[Prefix], step: int) -> None:
        """Record that no tier has blocks with these prefixes any more."""
        for prefix in prefixes:
            self._evicted[prefix.digest] = step
            _remove_digest(self._following, prefix.predecessor_key, prefix.digest)
            if not prefix.parent:
                _remove_digest(self._first, prefix.tokens, prefix.digest)
            if len(self._evicted) > MAX_EVICTED_DIGESTS:
                self._drop_oldest()

    def clear(self) -> None:
        self._evicted.clear()
        self._following.clear()
        self._first.clear()

    def explain(self, prefix: Prefix) -> Miss:
        evicted_at = self._evicted.get(prefix.digest)
        if evicted_at is not None:
            return Miss("evicted", prefix.start, evicted_at)
        variants = None if prefix.parent else self._first.get(prefix.tokens)
        if variants and prefix.digest not in variants:  # it may be cached in a tier where loading does not pay off
            return Miss("salt" if prefix.adapter_key in variants.values() else "adapter")
        siblings = self._following.get(prefix.predecessor_key)
        if siblings:
            nearest = islice(reversed(siblings.values()), MAX_SIBLINGS)  # only the newest: there may be very many
            num_same = max(_num_equal_tokens(prefix.tokens, other) for other in nearest)
            return Miss("differs", prefix.start + num_same)
        return Miss("unseen", prefix.start) if prefix.start else Miss("new")

    def _drop_oldest(self) -> None:
        for digest in list(islice(self._evicted, EVICTED_BATCH)):
            del self._evicted[digest]


def _remove_digest(digests_by_key: dict[bytes, dict[bytes, bytes]], key: bytes, digest: bytes) -> None:
    digests = digests_by_key.get(key)
    if digests is not None:
        digests.pop(digest, None)
        if not digests:
            del digests_by_key[key]


def _num_equal_tokens(tokens: bytes, other: bytes) -> int:
    for low in range(0, min(len(tokens), len(other)), 4):
        if tokens[low : low + 4] != other[low : low + 4]:
            return low // 4
    return min(len(tokens), len(other)) // 4
