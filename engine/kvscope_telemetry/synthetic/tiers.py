"""The lower tiers of the synthetic engine: places in host memory and on disk below a pool's blocks.

Owns the rows of the ledger after the pool's, and what moved in the step. A preempted request's blocks are kept here
(swapped), and cached blocks that the pool evicts sink here and come back on a hit. Without places every call says no.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.telemetry import Moves
from kvscope_telemetry.synthetic.pool import Ids, SyntheticPool

_COPIED_COLUMNS = ("filled", "owner", "prefix_hits", "hash", "parent")


@dataclass(slots=True)
class _Tier:
    """Free places as a stack, cached ones oldest first (some of them taken since)."""

    tier: Tier
    free: list[int]
    cached: deque[int] = field(default_factory=deque)
    num_cached: int = 0


class SyntheticTiers:
    """`num_host` places in host memory, then `num_disk` on disk, in the ledger of `pool`."""

    def __init__(self, pool: SyntheticPool, num_host: int, num_disk: int) -> None:
        self._pool = pool
        self._ledger = pool.ledger
        ends = (pool.num_blocks, pool.num_blocks + num_host, pool.num_blocks + num_host + num_disk)
        self._tiers = [
            _Tier(tier, list(range(end - 1, start - 1, -1)))
            for tier, start, end in ((Tier.HOST, ends[0], ends[1]), (Tier.DISK, ends[1], ends[2]))
        ]
        for part in self._tiers:
            self._ledger.tier[part.free] = part.tier
        self.exist = num_host + num_disk > 0
        self.totals = dict.fromkeys(("swapped_blocks", "offloaded_blocks", "loaded_blocks", "copied_blocks"), 0)
        self._moves: dict[str, list[int]] = {}

    def swap_out(self, blocks: Ids, owner: int, step: int) -> list[int] | None:
        """Places that now keep copies of `blocks` for request `owner`; None when there are not enough."""
        room = sum(len(part.free) + part.num_cached for part in self._tiers)
        if not self.exist or room < len(blocks):
            return None
        places = [self._take(step) for _ in range(len(blocks))]
        self._copy(blocks, np.array(places), step)
        self._ledger.state[places], self._ledger.ref_count[places] = BlockState.ACTIVE, 1
        self._ledger.owner[places] = owner
        self._say("saved", places)
        self.totals["swapped_blocks"] += len(places)
        return places

    def load(self, places: Ids, blocks: Ids, owner: int, step: int) -> None:
        """Write what `places` keep to `blocks` of the pool, which `owner` holds; the places are free again."""
        self._copy(places, blocks, step)
        self._ledger.owner[blocks] = owner
        self.give_up(places, step)
        self._say("loaded", blocks.tolist())
        self.totals["loaded_blocks"] += len(blocks)

    def give_up(self, places: Ids, step: int) -> None:
        """Nobody needs `places` any more."""
        self._clear(places, step)
        for part in self._tiers:
            part.free.extend(places[self._ledger.tier[places] == part.tier].tolist())

    def offload(self, block: int, step: int) -> None:
        """The pool gives up the cached `block`: keep a copy, a tier further down for an older one of these."""
        self._say("evicted", [block])
        if self.exist:
            self._offload_into(0, block, step)

    def newest_cached(self, count: int) -> Ids:
        """Up to `count` places that keep cached blocks, the newest of host memory first; they stay cached."""
        cached = (p for part in self._tiers for p in reversed(part.cached) if self._is_cached(p))
        return np.array(list(dict.fromkeys(islice(cached, count))), np.int64)

    def copied(self, blocks: Ids) -> None:
        """`blocks` were copied on write."""
        self._say("copied", blocks.tolist())
        self.totals["copied_blocks"] += len(blocks)

    def take_moves(self) -> Moves:
        """What moved since the last call; nothing is told without lower tiers."""
        moves, self._moves = self._moves, {}
        if not self.exist:
            return Moves()
        return Moves(**{name: np.array(ids, "<u4").tobytes() for name, ids in moves.items()})

    def _take(self, step: int) -> int:
        """A place for a block that is needed: as near the pool as there is one, free or with a cached block."""
        part = next(part for part in self._tiers if part.free or part.num_cached)
        return part.free.pop() if part.free else self._evict(part, step)

    def _evict(self, part: _Tier, step: int) -> int:
        place = self._oldest_cached(part)
        self._clear(np.array([place]), step)
        return place

    def _oldest_cached(self, part: _Tier) -> int:
        while not self._is_cached(part.cached[0]):
            part.cached.popleft()
        return part.cached[0]

    def _offload_into(self, level: int, row: int, step: int) -> None:
        """Copy the cached `row` to tier `level`; its oldest cached one is offloaded further, and is lost at the end."""
        if level == len(self._tiers):
            return
        part = self._tiers[level]
        if not part.free and not part.num_cached:
            self._offload_into(level + 1, row, step)
            return
        if not part.free:
            self._offload_into(level + 1, self._oldest_cached(part), step)
            part.free.append(self._evict(part, step))
        place = part.free.pop()
        self._copy(np.array([row]), np.array([place]), step)
        self._ledger.state[place] = BlockState.CACHED
        part.cached.append(place)
        part.num_cached += 1
        self._say("saved", [place])
        self.totals["offloaded_blocks"] += 1

    def _copy(self, source: Ids, target: Ids, step: int) -> None:
        for name in _COPIED_COLUMNS:
            column = getattr(self._ledger, name)
            column[target] = column[source]
        self._pool.touch(target, step)

    def _clear(self, places: Ids, step: int) -> None:
        ledger = self._ledger
        for part in self._tiers:
            gone = (ledger.tier[places] == part.tier) & (ledger.state[places] == BlockState.CACHED)
            part.num_cached -= int(gone.sum())
        ledger.state[places], ledger.owner[places], ledger.ref_count[places] = BlockState.FREE, NO_OWNER, 0
        ledger.filled[places], ledger.prefix_hits[places] = 0, 0
        ledger.hash[places], ledger.parent[places] = 0, 0
        self._pool.touch(places, step)

    def _is_cached(self, place: int) -> bool:
        return bool(self._ledger.state[place] == BlockState.CACHED)

    def _say(self, name: str, ids: list[int]) -> None:
        self._moves.setdefault(name, []).extend(ids)
