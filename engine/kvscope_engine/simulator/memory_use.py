"""Effective memory use as in PagedAttention's figure 2 (SOSP'23): what the KV slots of the pool were used for.

A sample is taken in every step that leaves requests waiting, after the step's tokens were written and before finished
requests leave. It assigns each slot of the pool to one class, as `policy.allocation.fragmentation` counts them:

- states: contains the KV of a token of a running request (counted once if several requests share it);
- reserved: reserved for a token that its request will still compute;
- internal: reserved for a request that will never use it, or the unused part of a last block;
- external and others: free, or allocated only because an allocator rounds up to powers of two;
- cached: holds a cached prefix that no running request uses. The paper's cache has none.

Each reported share is the mean, over these samples, of the class's slots divided by all slots of the pool. The five
shares add up to 1. Without a sample they are unknown.
"""

from __future__ import annotations

import msgspec

from kvscope_engine.policy.allocation.fragmentation import KVUse


class MemoryShares(msgspec.Struct, frozen=True, kw_only=True):
    """Mean fractions of all KV slots, from 0 to 1, over the steps that left requests waiting."""

    states: float
    reserved: float
    internal: float
    external_and_others: float
    cached: float
    external_fragmentation: float
    """Mean of 1 - (slots in the longest free run) / (free slots). It is not a fraction of the pool, so not part
    of the sum.
    """


class MemoryUse:
    __slots__ = ("_sums", "num_samples")

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums = [0.0] * 6

    def add(self, use: KVUse) -> None:
        self.num_samples += 1
        slots = use.num_slots
        sums = self._sums
        sums[0] += use.num_used / slots
        sums[1] += use.num_reserved / slots
        sums[2] += use.num_internal / slots
        sums[3] += use.num_external_and_others / slots
        sums[4] += use.num_cached / slots
        sums[5] += use.external_fragmentation

    def shares(self) -> MemoryShares | None:
        if not self.num_samples:
            return None
        states, reserved, internal, external, cached, fragmentation = (value / self.num_samples for value in self._sums)
        return MemoryShares(
            states=states,
            reserved=reserved,
            internal=internal,
            external_and_others=external,
            cached=cached,
            external_fragmentation=fragmentation,
        )
