"""Hashes of the blocks of requests, recorded while each request runs and when it ends. Imports no Qt.

A mirror forgets a request's block table when the request ends, and an evicted block leaves no trace in the ledger. With
the recorded hashes, the blocks of a request can be found, or be recognized as evicted, at any later time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.prefixes.cached_blocks import group_of_tree

Hashes = npt.NDArray[np.uint64]
"""Hash of each block of a request in order, 0 for a block without a hash, shape (n,)."""
MAX_CHAINS: Final = 2_000
"""Maximum number of requests whose hashes are stored; the oldest are dropped."""
_LOW_BITS: Final = np.uint64(0xFFFF)


class BlockChains:
    """Recorded hashes of each request, by epoch and number. `record` must be called regularly while a request runs, and
    once after it has ended.
    """

    def __init__(self) -> None:
        self._chains: dict[tuple[int, int], Hashes] = {}
        self._completed: set[tuple[int, int]] = set()

    def get(self, epoch: int, number: int) -> Hashes | None:
        """Return the hashes of a request's blocks, or None if none was observed."""
        return self._chains.get((epoch, number))

    def is_complete(self, epoch: int, number: int) -> bool:
        """Whether the request's blocks were recorded after it had ended."""
        return (epoch, number) in self._completed

    def add_complete(self, epoch: int, number: int, hashes: Hashes) -> None:
        """Add the hashes of a request that has ended, as recorded before."""
        self._store((epoch, number), hashes)
        self._completed.add((epoch, number))

    def record(self, mirror: Mirror, number: int) -> None:
        """Record the blocks of request `number` in `mirror`, which must be the engine's current state."""
        row = mirror.requests.row_of(number)
        if mirror.hello is None or row is None or (mirror.hello.epoch, number) in self._completed:
            return
        key, group = (mirror.hello.epoch, number), tree_group(mirror.hello.cache)
        known = self._chains.get(key, np.empty(0, np.uint64))
        table = mirror.requests.table(number, group)
        if table.size:
            is_block = table >= mirror.requests.num_reserved
            hashes = np.where(is_block, mirror.ledger.hash[np.where(is_block, table, 0)], np.uint64(0))
            num_both = min(known.size, hashes.size)  # blocks that the request has released keep their hashes
            hashes[:num_both] = np.where(hashes[:num_both] == 0, known[:num_both], hashes[:num_both])
            self._store(key, hashes)
        elif mirror.requests.state[row] == RequestState.FINISHED:
            self._completed.add(key)
            if mirror.hello.cache.has_parents:
                ends = mirror.last_hashes.get(number, 0), _last_hash_written(mirror.ledger, group, number)
                for last_hash in dict.fromkeys(ends):
                    known = _extended(known, _hashes_before(mirror.ledger, group, last_hash))
                self._store(key, known)

    def _store(self, key: tuple[int, int], hashes: Hashes) -> None:
        if hashes.size:
            self._chains[key] = hashes
        while len(self._chains) > MAX_CHAINS:
            oldest = next(iter(self._chains))
            del self._chains[oldest]


class HashIndex:
    """Ledger rows of a set of hashes. Building it takes time linear in the ledger, for any number of hashes."""

    def __init__(self, mirror: Mirror, hashes: Iterable[Hashes]) -> None:
        self._hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))
        self._rows = np.full(self._hashes.size, -1, np.int64)
        ledger = mirror.ledger
        if mirror.hello is None or not self._hashes.size:
            return
        # Compare the low bits first: a search for each hash of the ledger would take three times as long.
        is_possible = np.zeros(_LOW_BITS + 1, np.bool_)
        is_possible[(self._hashes & _LOW_BITS).astype(np.intp)] = True
        rows = np.flatnonzero(is_possible[(ledger.hash & _LOW_BITS).astype(np.intp)])
        rows = rows[(ledger.hash[rows] != 0) & (ledger.group[rows] == tree_group(mirror.hello.cache))]
        rows = rows[(ledger.state[rows] == BlockState.ACTIVE) | (ledger.state[rows] == BlockState.CACHED)]
        index = np.minimum(np.searchsorted(self._hashes, ledger.hash[rows]), self._hashes.size - 1)
        is_wanted = self._hashes[index] == ledger.hash[rows]
        rows, index = rows[is_wanted], index[is_wanted]
        order = np.argsort(-ledger.tier[rows].astype(np.int64), kind="stable")  # written last: the copy in the pool
        self._rows[index[order]] = rows[order]

    def rows_of(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Return the ledger row of each of `hashes`, -1 if no tier has the block, in the shape of `hashes`.

        Each hash must be 0 or one of those with which the index was built.
        """
        if not self._hashes.size:
            return np.full(hashes.size, -1, np.int64)
        index = np.minimum(np.searchsorted(self._hashes, hashes), self._hashes.size - 1)
        return np.where((self._hashes[index] == hashes) & (hashes != 0), self._rows[index], -1)


def tree_group(cache: CacheInfo) -> int:
    """Return the index of the KV group whose blocks stand for a request: one that keeps the whole text."""
    return group_of_tree(cache) or 0


def num_equal_blocks(first: Hashes | None, second: Hashes | None) -> int:
    """Return the number of leading blocks with equal hashes, which store the same text. 0 if a chain is None."""
    if first is None or second is None:
        return 0
    length = min(first.size, second.size)
    differs = np.flatnonzero((first[:length] != second[:length]) | (first[:length] == 0))
    return int(differs[0]) if differs.size else length


def _last_hash_written(ledger: Ledger, group: int, number: int) -> int:
    """Return the hash of the last cached block that request `number` wrote, 0 if there is none."""
    rows = np.flatnonzero((ledger.owner == number) & (ledger.hash != 0) & (ledger.group == group))
    ends = rows[~np.isin(ledger.hash[rows], ledger.parent[rows])]
    return int(ledger.hash[ends[-1]]) if ends.size else 0


def _hashes_before(ledger: Ledger, group: int, last_hash: int) -> Hashes:
    """Return the hashes of a text's blocks up to the one with `last_hash`, as far back as blocks are cached.

    If a block before them is no longer cached, its hash comes first; it is known from the block after it.
    """
    rows = np.flatnonzero((ledger.hash != 0) & (ledger.group == group))
    rows = rows[np.argsort(ledger.hash[rows], kind="stable")]
    hashes, parents = ledger.hash[rows], ledger.parent[rows]
    found: list[int] = []
    seen: set[int] = set()
    wanted = last_hash
    while wanted and wanted not in seen:
        seen.add(wanted)
        found.append(wanted)
        index = int(np.searchsorted(hashes, np.uint64(wanted)))
        if index == hashes.size or int(hashes[index]) != wanted:
            return np.array([0, *found[::-1]], np.uint64)  # blocks before it are unknown
        wanted = int(parents[index])
    return np.array(found[::-1], np.uint64)


def _extended(known: Hashes, found: Hashes) -> Hashes:
    """Return the chain `found`, or the part of it that follows a hash in `known` appended to `known`.

    Returns `known` if `found` does not reach back to the first block or to a block in `known`.
    """
    if not found.size or found[0]:
        return found if found.size >= np.count_nonzero(known) else known
    positions = {value: position for position, value in enumerate(known.tolist()) if value}
    for index in range(found.size - 1, 0, -1):
        position = positions.get(int(found[index]))
        if position is not None:
            return np.concatenate([known[: position + 1], found[index + 1 :]])
    return known
