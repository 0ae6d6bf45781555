"""Offloads evicted prefixes and swapped-out requests to host memory and disk, and loads them back.

Owns the slots of both tiers; `TierMover` copies the bytes. When space is short, evicted prefixes are dropped. Blocks of
swapped-out requests (`Request.saved_tables`) are not dropped: when they fill host memory, those of the lowest-ranked
request (`ranked_queue.rank`) move to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_offload.mover_protocol import TierMover
from kvscope_engine.policy.kv_offload.tier_slots import TierSlots
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_engine.policy.ranked_queue import rank
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduler_totals import SchedulerTotals
from kvscope_telemetry.ledger import NO_OWNER, Tier

_Item = TypeVar("_Item")

BOUNCE_SHARE: Final = 64
"""One in `BOUNCE_SHARE` host slots is reserved as a bounce buffer for blocks loaded from disk."""
MAX_BOUNCE: Final = 256
SHUTDOWN_BATCH_BLOCKS: Final = 64
"""Number of blocks per write to disk at shutdown."""


def num_bounce(num_host: int) -> int:
    """Return how many of `num_host` host slots are reserved as a bounce buffer if there is a disk tier."""
    return min(MAX_BOUNCE, max(1, num_host // BOUNCE_SHARE))


def _last(items: list[_Item], count: int) -> list[_Item]:
    """Return the last `count` items. (`items[-count:]` would return all items if `count` is 0.)"""
    return items[len(items) - count :]


class LowerTiers:
    """Tiers below the pool: `pool.num_host` slots in host memory, and `pool.num_disk` slots on disk (0 without a disk
    tier).

    `on_table` is called with each request whose `saved_tables` changed.
    """

    def __init__(
        self, pool: BlockPool, mover: TierMover, totals: SchedulerTotals, on_table: Callable[[Request], None]
    ) -> None:
        assert pool.num_host > 0, "there is no lower tier without host memory"
        self.host = TierSlots(pool, Tier.HOST)
        self.disk = TierSlots(pool, Tier.DISK)
        self._pool = pool
        self._mover = mover
        self._totals = totals
        self._on_table = on_table
        self._swapped: dict[int, Request] = {}
        self._waits_for_disk = False
        has_disk = pool.num_disk > 0
        self._num_bounce = num_bounce(pool.num_host) if has_disk else 0
        pool.lower_tier = self
        self._add_recovered(mover.recovered())

    def find(self, digest: bytes) -> int | None:
        """Return the ledger row of the prefix with `digest` in the highest tier below the pool that holds it,
        or None.
        """
        row = self.host.find(digest)
        return self.disk.find(digest) if row is None else row

    def is_on_disk(self, row: int) -> bool:
        return row in self.disk

    def offload(self, blocks: list[int], prefixes: list[Prefix]) -> list[bool]:
        """Copy evicted blocks to host memory, unless it has their prefixes already.

        Returns, for each prefix, whether it can still be found in a lower tier.
        """
        missing = [i for i, prefix in enumerate(prefixes) if not self._refresh_if_on_host(prefix)]
        batch_size = max(1, self.host.count - self._num_bounce)
        # Earlier parts are moved on to disk to make space for later ones.
        for low in range(0, len(missing), batch_size):
            part = missing[low : low + batch_size]
            # Blocks are evicted oldest first: if not all fit, the most recently used ones are saved.
            to_save = _last(part, self._free_host_slots(len(part)))
            self._save([blocks[i] for i in to_save], [prefixes[i] for i in to_save])
        return [self.find(prefix.digest) is not None for prefix in prefixes]

    def swap_out(
        self, request: Request, blocks: Sequence[int], prefixes: Sequence[Prefix | None], filled: Sequence[int]
    ) -> list[int] | None:
        """Copy `blocks`, which contain the request's computed tokens, to host memory. Returns their new ledger rows.

        Returns None, and does nothing, if there is not enough space. `filled` is the number of used token slots of each
        block; `prefixes` has the prefix of each full block, and None for partial ones. For a prefix that is in host
        memory already, a reference to its row is added and nothing is copied.
        """
        host_rows = [None if prefix is None else self.host.find(prefix.digest) for prefix in prefixes]
        acquired = [row for row in host_rows if row is not None]
        self.host.acquire(acquired)
        missing = [i for i, row in enumerate(host_rows) if row is None]
        if self._free_host_slots(len(missing), may_demote_swapped=True) < len(missing):
            self.host.release(acquired)
            return None
        rows = self.host.allocate(len(missing), [request.number] * len(missing))
        blocks_to_save = [blocks[i] for i in missing]
        self._mover.save(blocks_to_save, self.host.slots(rows))
        self.host.fill(
            rows, [filled[i] for i in missing], [prefixes[i] for i in missing], self._groups_of(blocks_to_save)
        )
        self._pool.moves.record_saved(rows)
        self._totals.swapped_blocks += len(rows)
        new_rows = iter(rows)
        self._swapped[request.number] = request
        return [next(new_rows) if row is None else row for row in host_rows]

    def acquire(self, rows: Sequence[int]) -> None:
        """Add a reference to ledger rows that will be loaded, so that they are not evicted."""
        for tier in (self.host, self.disk):
            tier.acquire([row for row in rows if row in tier])

    def release(self, rows: Sequence[int]) -> None:
        for tier in (self.host, self.disk):
            tier.release([row for row in rows if row in tier])

    def release_saved(self, request: Request) -> None:
        """Release the host and disk slots of a swapped-out request that resumed or ended."""
        self.release(request.saved_rows)
        request.saved_tables = ()
        request.num_saved_tokens = 0
        self._swapped.pop(request.number, None)

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> list[bool]:
        """Copy the contents of the acquired ledger `rows` to `blocks` of the pool.

        Returns, for each row, whether it was read. The prefixes of unreadable rows are dropped.
        """
        on_host = [i for i, row in enumerate(rows) if row in self.host]
        self._mover.load(self.host.slots([rows[i] for i in on_host]), [blocks[i] for i in on_host])
        are_read = [True] * len(rows)
        on_disk = [i for i, row in enumerate(rows) if row in self.disk]
        are_read_from_disk = self._load_from_disk([rows[i] for i in on_disk], [blocks[i] for i in on_disk])
        for i, is_read in zip(on_disk, are_read_from_disk, strict=True):
            are_read[i] = is_read
        self._pool.moves.record_loaded([block for block, is_read in zip(blocks, are_read, strict=True) if is_read])
        self._totals.loaded_blocks += sum(are_read)
        return are_read

    def prefix(self, row: int) -> Prefix | None:
        return (self.host if row in self.host else self.disk).prefix(row)

    def filled(self, row: int) -> int:
        """Return the number of used token slots in a ledger row of host memory or disk."""
        return int(self._pool.ledger.filled[row])

    def reset(self) -> None:
        """Drop every prefix. The blocks of swapped-out requests remain."""
        self.host.clear()
        self.disk.clear()
        self._mover.forget_prefixes()

    def save_prefixes_to_disk(self, may_continue: Callable[[], bool]) -> None:
        """Write cached prefixes to disk at shutdown, as space permits, until `may_continue()` returns False.

        Without this, a disk file kept for the next start would lack the most recently used blocks, and with them the
        first blocks of all prompts, because the blocks of a prompt are evicted from its end.
        """
        self._waits_for_disk = True
        self._pool.allocate(self._pool.num_free, NO_OWNER)  # from then on, each allocation evicts cached blocks
        while self._pool.num_cached and may_continue():
            self._pool.allocate(min(SHUTDOWN_BATCH_BLOCKS, self._pool.num_cached), NO_OWNER)
        while self.host.num_cached and may_continue():
            self._demote_cached(SHUTDOWN_BATCH_BLOCKS)

    def swap_seconds(self, num_blocks: int) -> float:
        return self._mover.swap_seconds(num_blocks)

    def load_seconds(self, num_blocks: int, num_from_disk: int) -> float:
        return self._mover.load_seconds(num_blocks, num_from_disk)

    def flush(self) -> None:
        """Complete all copies. Called before the step runs."""
        self._mover.flush()

    @property
    def failure(self) -> str:
        """Reason why the disk tier is no longer used; empty if there was no failure."""
        return self._mover.failure

    def check_integrity(self, requests: Iterable[Request]) -> None:
        tables = [request.saved_rows for request in requests]
        self.host.check(tables)
        self.disk.check(tables)
        held = {request.number for request in requests if request.saved_tables}
        assert held == set(self._swapped), f"swapped out are {held}, known are {set(self._swapped)}"

    def _groups_of(self, rows: list[int]) -> list[int]:
        groups: list[int] = self._pool.ledger.group[rows].tolist()
        return groups

    def _refresh_if_on_host(self, prefix: Prefix) -> bool:
        """Mark the prefix as just used if host memory holds it. Returns whether it does."""
        row = self.host.find(prefix.digest)
        if row is not None:
            self.host.refresh(row)
        return row is not None

    def _save(self, blocks: list[int], prefixes: list[Prefix]) -> None:
        owners = self._pool.ledger.owner[blocks].tolist()
        rows = self.host.allocate(len(blocks), owners)
        self._mover.save(blocks, self.host.slots(rows))
        self.host.fill(rows, [self._pool.block_size] * len(rows), prefixes, self._groups_of(blocks))
        self.host.release(rows)
        self._pool.moves.record_saved(rows)
        self._totals.offloaded_blocks += len(rows)

    def _free_host_slots(self, count: int, *, may_demote_swapped: bool = False) -> int:
        """Free host slots until `count` slots are free in addition to the bounce buffer, if possible.

        Returns the number of free slots, at most `count`. With `may_demote_swapped`, rows of swapped-out requests may
        be moved to disk too.
        """
        missing = count + self._num_bounce - self.host.num_free
        if missing > 0:
            missing -= self._demote_cached(missing)
        if missing > 0 and may_demote_swapped:
            self._demote_swapped(missing)
        return min(count, max(0, self.host.num_free - self._num_bounce))

    def _demote_cached(self, count: int) -> int:
        """Free up to `count` cached host slots, oldest first, and copy their content to disk if possible.

        Returns the number of slots freed.
        """
        oldest = self.host.oldest(count)
        self._copy_to_disk(oldest)
        self._drop_prefixes(self.host, oldest)
        return len(oldest)

    def _drop_prefixes(self, tier: TierSlots, rows: list[int]) -> None:
        """Drop the prefixes of ledger `rows` from `tier`, and record those that no tier has any more."""
        prefixes = [tier.drop_prefix(row) for row in rows]
        lost = [prefix for prefix in prefixes if prefix is not None and self._is_lost(prefix)]
        if self._pool.history is not None:
            self._pool.history.record_lost(lost, self._pool.step)

    def _is_lost(self, prefix: Prefix) -> bool:
        index = self._pool.index
        return (index is None or index.get(prefix.digest) is None) and self.find(prefix.digest) is None

    def _copy_to_disk(self, rows: list[int]) -> None:
        """Copy those host rows that have a prefix to disk, unless the disk has the prefix already.

        If the drive is slow, only as many are copied as it accepts without waiting: cached blocks never wait for the
        disk (docs/internals/decisions/0021-cached-blocks-never-wait-for-the-disk.md).
        """
        missing = [row for row in rows if not self._refresh_if_on_disk(row)]
        max_copied = len(missing) if self._waits_for_disk else min(len(missing), self._mover.num_offloadable)
        num_free = self._free_disk_slots(max_copied)
        targets = self._write_to_disk(_last(missing, num_free))
        self.disk.release([target for target in targets if target is not None])

    def _refresh_if_on_disk(self, row: int) -> bool:
        """Mark the prefix of a host row as just used on disk if the disk holds it. Returns whether it does."""
        prefix = self.host.prefix(row)
        disk_row = None if prefix is None else self.disk.find(prefix.digest)
        if disk_row is not None:
            self.disk.refresh(disk_row)
        return disk_row is not None

    def _write_to_disk(self, rows: list[int]) -> list[int | None]:
        """Copy host rows to free slots on disk, with one reference each.

        Returns the disk row of each host row, or None if it could not be written.
        """
        if not rows:
            return []
        owners = [int(owner) for owner in self._pool.ledger.owner[rows]]
        targets = self.disk.allocate(len(rows), owners)
        prefixes = [self.host.prefix(row) for row in rows]
        are_written = self._mover.offload(self.host.slots(rows), self.disk.slots(targets), prefixes)
        filled = [self.filled(row) for row in rows]
        written_prefixes = [prefix if ok else None for prefix, ok in zip(prefixes, are_written, strict=True)]
        self.disk.fill(targets, filled, written_prefixes, self._groups_of(rows))
        self.disk.release([target for target, ok in zip(targets, are_written, strict=True) if not ok])
        self._pool.moves.record_saved([target for target, ok in zip(targets, are_written, strict=True) if ok])
        return [target if ok else None for target, ok in zip(targets, are_written, strict=True)]

    def _free_disk_slots(self, count: int) -> int:
        if not self._mover.has_disk or not count:
            return 0
        self._drop_prefixes(self.disk, self.disk.oldest(count - self.disk.num_free))
        return min(count, self.disk.num_free)

    def _demote_swapped(self, count: int) -> None:
        """Move up to `count` host rows of swapped-out requests to disk, starting with the lowest-ranked request."""
        for request in sorted(self._swapped.values(), key=rank, reverse=True):
            if count <= 0:
                return
            own = [row for row in request.saved_rows if row in self.host and self.host.ref_count(row) == 1]
            rows = _last(own, min(count, len(own)))
            rows = _last(rows, self._free_disk_slots(len(rows)))
            targets = self._write_to_disk(rows)
            moved = {row: target for row, target in zip(rows, targets, strict=True) if target is not None}
            for row in moved:
                self.host.drop_prefix(row)
            self.host.release(list(moved))
            request.saved_tables = tuple([moved.get(row, row) for row in table] for table in request.saved_tables)
            count -= len(moved)
            self._on_table(request)

    def _load_from_disk(self, rows: list[int], blocks: list[int]) -> list[bool]:
        is_read: list[bool] = []
        while len(is_read) < len(rows):
            low = len(is_read)
            bounce_rows = self.host.allocate(min(len(rows) - low, self.host.num_free), NO_OWNER)
            assert bounce_rows, "no host place is free for blocks on their way up"
            batch_rows = rows[low : low + len(bounce_rows)]
            are_read = self._mover.load_from_disk(self.disk.slots(batch_rows), self.host.slots(bounce_rows))
            readable = [i for i, ok in enumerate(are_read) if ok]
            self._mover.load(self.host.slots([bounce_rows[i] for i in readable]), [blocks[low + i] for i in readable])
            self.host.release(bounce_rows)
            self._drop_unreadable([row for row, ok in zip(batch_rows, are_read, strict=True) if not ok])
            is_read += are_read
        return is_read

    def _drop_unreadable(self, rows: list[int]) -> None:
        self._totals.lost_blocks += len(rows)
        self._drop_prefixes(self.disk, rows)

    def _add_recovered(self, recovered: Sequence[tuple[int, Prefix]]) -> None:
        """Add the disk slots whose content a previous run left in the disk file. There may be very many."""
        rows, prefixes = [self.disk.first + slot for slot, _ in recovered], [prefix for _, prefix in recovered]
        self.disk.adopt(rows)
        groups = [prefix.group for prefix in prefixes]
        self.disk.fill(rows, [self._pool.block_size] * len(rows), prefixes, groups)
        self.disk.release(rows)
        if self._pool.history is not None:
            for prefix in prefixes:
                self._pool.history.record_cached(prefix)
