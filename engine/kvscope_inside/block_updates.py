"""Writes the block allocations, cache hits and evictions of a host engine to the ledger rows and block tables of its
pool.

Decides which columns of a ledger row each kind of change sets. Part of a `Translator`; used on the publishing thread
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvscope_inside.cached_texts import CachedTexts
from kvscope_inside.evicted_hashes import EvictedHashes
from kvscope_inside.host_request import HostRequest
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.producer.cache_state import CacheState


@dataclass(slots=True)
class StepChanges:
    """Changes of blocks that are collected while one frame is built."""

    number: int = 0
    time_ns: int = 0
    evicted: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Ledger rows of blocks that were written, found by a prompt, or released."""

    def start(self, number: int, time_ns: int) -> None:
        """Clear the changes of the last frame and start step `number`, which was recorded at `time_ns` (monotonic)."""
        self.number, self.time_ns, self.evicted, self.used = number, time_ns, [], set()


class BlockUpdates:
    """Applies changes of blocks to `state` and collects them in `step`.

    Args:
        texts: Tokens of cached blocks. They are discarded when a block loses its cached prefix.
        evicted_hashes: Receives the hashes of blocks that lose their cached prefix.
    """

    def __init__(self, state: CacheState, step: StepChanges, texts: CachedTexts, evicted_hashes: EvictedHashes) -> None:
        self._state, self._step, self._texts, self._evicted_hashes = state, step, texts, evicted_hashes
        self._num_reserved = state.hello.cache.num_reserved_blocks

    def allocate(self, request: HostRequest | None, rows: Sequence[int], *, group: int = 0, start: int = 0) -> None:
        """Publish new blocks of a request. They become the entries of its block table from index `start` on.

        `request` is None if the owner of the blocks is unknown.
        """
        owner = NO_OWNER if request is None else request.known.number
        self._step.used.update(rows)
        self._state.set_blocks(
            rows,
            state=BlockState.ACTIVE,
            ref_count=1,
            filled=0,
            owner=owner,
            prefix_hits=0,
            hash=0,
            parent=0,
            group=group,
        )
        if request is not None:
            self.set_table(request, rows, group=group, start=start)

    def record_hits(self, rows: Sequence[int], **columns: npt.ArrayLike) -> None:
        """Publish that a prompt found these blocks in the cache. `columns` are ledger columns to set in addition."""
        self._step.used.update(rows)
        self._state.set_blocks(rows, prefix_hits=self._state.more_hits(rows), **columns)

    def cache(self, row: int, *, hash_value: int, parent: int, filled: int, group: int = 0) -> None:
        """Publish that prompts can find the block in `row`. `parent`: hash of the preceding block, 0 for the
        first block of a text.
        """
        self._state.set_blocks([row], hash=hash_value, parent=parent, filled=filled, group=group)

    def discard_prefixes(self, rows: Sequence[int]) -> list[int]:
        """Discard the tokens and record the hashes of blocks that are overwritten or freed. Returns the rows
        that had a cached prefix.
        """
        hashes = self._state.ledger.hash[np.asarray(rows, np.int64)].tolist()
        cached = [row for row, value in zip(rows, hashes, strict=True) if value]
        for row in cached:
            self._texts.discard(row)
        self._evicted_hashes.record(filter(None, hashes), self._step.number)
        return cached

    def evict(self, rows: Sequence[int]) -> list[int]:
        """Publish that cached blocks of the pool were evicted. Returns the rows that had a cached prefix."""
        evicted = self.discard_prefixes(rows)
        self._step.evicted += evicted
        self._state.count(evicted_blocks=len(evicted))
        return evicted

    def set_table(self, request: HostRequest, rows: Sequence[int], *, group: int = 0, start: int = 0) -> None:
        request.known.set_table(rows, group, start)
        self._state.touch(request.known)

    def release_tables(self, request: HostRequest) -> int:
        """Clear the block tables of a request. Returns the number of blocks in them, without reserved blocks."""
        num_blocks = self.num_blocks_of(request)
        for group, table in enumerate(request.known.tables):
            self._step.used.update(row for row in table if row >= self._num_reserved)
            request.known.set_table((), group)
        self._state.touch(request.known)
        return num_blocks

    def num_blocks_of(self, request: HostRequest) -> int:
        """Return the number of blocks in the tables of a request, summed over all KV groups, without reserved
        blocks.
        """
        return sum(row >= self._num_reserved for table in request.known.tables for row in table)

    def fill(self, filled: Mapping[int, int]) -> None:
        """Set the number of tokens in blocks. `filled` maps ledger rows to numbers of tokens."""
        self._step.used.update(filled)
        self._state.set_blocks(list(filled), filled=list(filled.values()))

    def set_ref_counts(
        self, rows: npt.NDArray[np.integer[Any]], ref_counts: npt.ArrayLike, hashes: npt.ArrayLike
    ) -> None:
        """Set the reference counts and hashes (0 for no hash) of blocks. A block without references and hash
        becomes free.
        """
        refs, hash_values = np.asarray(ref_counts, np.int32), np.asarray(hashes, np.uint64)
        state = np.where(refs > 0, BlockState.ACTIVE, np.where(hash_values != 0, BlockState.CACHED, BlockState.FREE))
        self._state.set_blocks(rows, state=state, ref_count=refs, hash=hash_values)
        self._state.set_blocks(rows[hash_values == 0], parent=0)
        free = rows[state == BlockState.FREE]
        self._state.free_blocks(free)
        for row in free.tolist():
            self._texts.discard(row)

    def mark_used(self) -> None:
        """Set `last_used_step` of the blocks used in this step. Must be called after all other changes of the step."""
        self._state.set_blocks(sorted(self._step.used), last_used_step=self._step.number)
