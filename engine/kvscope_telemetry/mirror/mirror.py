"""The mirror: a copy of an engine's state, rebuilt from snapshots and frames.

Owns the copy of the ledger, the requests, and the counts derived from them. An update takes O(changed rows). Must not
depend on the source of updates or on views. Updates are atomic: one that does not fit the state is rejected completely,
and the source then requests a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, BlockState, Column, Ledger, Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Counters, Heartbeat, Hello, MetricFigure, RequestRows, Snapshot
from kvscope_telemetry.mirror.coalesce import merge_request_rows
from kvscope_telemetry.mirror.request_mirror import MAX_FINISHED, RequestMirror
from kvscope_telemetry.mirror.whole_blocks import COUNTS_SHAPE, WholeBlocks, check_rows, count_kinds
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.source import Update

_STATE_INDICES: Final = {state: place for place, state in enumerate(BlockState)}
_TIER_INDICES: Final = {tier: place for place, tier in enumerate(Tier)}
"""Index of each tier in the array of row counts; UNKNOWN is the last one."""


class Mirror:
    """State of one engine. Before the first snapshot, `hello` is None and there are no blocks.

    Not thread-safe: updates and reads must happen on one thread.
    """

    def __init__(self, *, max_finished: int = MAX_FINISHED) -> None:
        self.hello: Hello | None = None
        self.seq = 0
        self.step = 0
        self.time_ns = 0
        """Time of the newest frame on the engine's monotonic clock."""
        self.ledger = Ledger(0)
        self.requests = RequestMirror(max_finished)
        self.counters = Counters()
        self.pinned: frozenset[int] = frozenset()
        """Ids of the blocks that are pinned, and so protected from eviction, as of the newest heartbeat."""
        self.pinned_by = ""
        self.limits = (0, 0)
        """`max_num_seqs` and `max_num_batched_tokens` as of the newest heartbeat; 0 if unknown."""
        self.used_share = -1.0
        """Used share of the pool's blocks, 0 to 1, as of the newest reading; -1 if unknown."""
        self.figures: tuple[MetricFigure, ...] = ()
        """Metrics that the engine reports about itself if it is not kvscope's own, as of the newest reading."""
        self.stops = RunningTime()
        """Pauses and suspensions of the engine, on its clock."""
        self.last_hashes: dict[int, int] = {}
        """Hash of the last cached block that each request had when it ended, by request number. Only the newest
        ended requests are included.
        """
        self.version = 0
        """Number that increases with each change of the mirror."""
        self._num_by_state = np.zeros(COUNTS_SHAPE, np.int64)
        self._order = np.empty(0, np.int32)  # scratch of _last_rows, shape (num_rows,)

    @property
    def epoch(self) -> int | None:
        return None if self.hello is None else self.hello.epoch

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities from the hello; before the first snapshot, those of kvscope's own engine."""
        return OWN_ENGINE if self.hello is None else self.hello.capabilities

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, with or without physical memory; 0 before the first snapshot."""
        return 0 if self.hello is None else self.hello.cache.num_blocks

    @property
    def num_rows(self) -> int:
        """Number of rows of the ledger. The rows are the pool's blocks, then the blocks of the lower tiers,
        then those of tiers that a later version added.
        """
        return self.ledger.num_blocks

    @property
    def num_free(self) -> int:
        return self.count(BlockState.FREE)

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks in the pool that can be allocated without eviction, because they are free.

        If there are fewer physical blocks than rows (allocator `virtual`), these are the physical blocks that are
        neither active nor cached.
        """
        physical = 0 if self.hello is None else self.hello.cache.num_physical_blocks
        return max(0, physical - self.num_active - self.num_cached) if physical else self.num_free

    @property
    def num_active(self) -> int:
        return self.count(BlockState.ACTIVE)

    @property
    def num_cached(self) -> int:
        """Number of blocks in the pool that no request uses and a later prompt may reuse."""
        return self.count(BlockState.CACHED)

    def count(self, state: BlockState, tier: Tier = Tier.HBM) -> int:
        return int(self._num_by_state[_TIER_INDICES[tier], _STATE_INDICES[state]])

    def apply(self, update: Update) -> None:
        """Advance the mirror to the state after `update`. If it raises ProtocolError, the state is unchanged.

        The snapshot of an update is applied even if the rest of the update is then rejected.
        """
        if update.snapshot is not None:
            self.reset(update.snapshot, update.blocks)
        request_rows = self._checked(update)
        time_ns = int(update.series["time_ns"][-1]) if update.series else self.time_ns
        self._record_last_hashes(request_rows)
        self.requests.apply(update.new_requests, request_rows, time_ns=time_ns)
        self._write_blocks(update.block_ids, update.block_columns)
        if update.series:
            self.seq = int(update.series["seq"][-1])
            self.step = int(update.series["step"][-1])
            self.time_ns = time_ns
        if update.counters is not None:
            self.counters = update.counters
        for event in update.events:
            self.stops.record(event)
        if update.heartbeat is not None:
            self._apply_heartbeat(update.heartbeat)
        if update.readings:
            self.used_share, self.figures = update.readings[-1].used_share, update.readings[-1].figures
        self.version += 1

    def _record_last_hashes(self, rows: RequestRows) -> None:
        """Record the last hash of each request that ends with this change, because its block tables become empty."""
        has_ended = np.frombuffer(rows.state, "u1") == RequestState.FINISHED
        for number in np.frombuffer(rows.number, "<u4")[has_ended].tolist() if has_ended.any() else ():
            hashes = self.ledger.hash[self.requests.blocks(number)]
            if hashes.any():
                self.last_hashes[number] = int(hashes[hashes != 0][-1])
        while len(self.last_hashes) > self.requests.max_finished:
            del self.last_hashes[next(iter(self.last_hashes))]

    def _apply_heartbeat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.pinned or self.pinned:
            self.pinned, self.pinned_by = (
                frozenset(np.frombuffer(heartbeat.pinned, "<u4").tolist()),
                heartbeat.pinned_by,
            )
        self.limits = (heartbeat.max_num_seqs, heartbeat.max_num_batched_tokens)

    def reset(self, snapshot: Snapshot, blocks: WholeBlocks | None = None) -> None:
        """Replace the state with `snapshot`. If it raises ProtocolError, the state is unchanged.

        `blocks`: the snapshot's blocks if they were already unpacked.
        """
        _check_table_blocks(snapshot.requests, len(snapshot.blocks.state))
        if blocks is None or blocks.snapshot is not snapshot:
            blocks = WholeBlocks(snapshot)
        is_same_epoch = self.epoch == snapshot.hello.epoch
        self.requests.reset(
            snapshot.requests_info, snapshot.requests, time_ns=snapshot.time_ns, same_epoch=is_same_epoch
        )
        self._replace_ledger(blocks)
        if not is_same_epoch:
            self.pinned, self.pinned_by, self.limits = frozenset(), "", (0, 0)
            self.used_share, self.figures = -1.0, ()
            self.stops, self.last_hashes = RunningTime(), {}
        self.stops.catch_up(snapshot.stops, snapshot.time_ns)
        self.requests.num_reserved = snapshot.hello.cache.num_reserved_blocks
        self.requests.group_of_states = snapshot.hello.cache.group_of_states
        self.hello, self.counters = snapshot.hello, snapshot.counters
        self.seq, self.step, self.time_ns = snapshot.seq, snapshot.step, snapshot.time_ns
        self.version += 1

    def _checked(self, update: Update) -> RequestRows:
        """Return the merged changes of requests. Raises ProtocolError if the update does not fit this state."""
        if self.hello is None:
            if update.series or update.block_ids.size or update.new_requests or update.requests:
                raise ProtocolError("frames came before the first snapshot")
            return RequestRows()
        if update.block_ids.size:
            highest = int(update.block_ids.max())
            if highest >= self.num_rows:
                raise ProtocolError(f"block {highest} changed, but the pool has {self.num_rows} blocks")
            check_rows(update.block_columns, max(self.hello.cache.block_sizes))
        rows = merge_request_rows(update.requests) if update.requests else RequestRows()
        _check_table_blocks(rows, self.num_rows)
        return rows

    def _write_blocks(self, ids: npt.NDArray[np.uint32], columns: Mapping[str, Column]) -> None:
        if not ids.size:
            return
        last = self._last_rows(ids)
        rows = ids[last].astype(np.intp)  # otherwise, numpy would convert it again for each column
        before = self._counts(rows)
        for name in COLUMNS:
            getattr(self.ledger, name)[rows] = columns[name][last]
        self._num_by_state += self._counts(rows) - before

    def _counts(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        return count_kinds(self.ledger.tier[rows], self.ledger.state[rows])

    def _last_rows(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        """Return the index of the last occurrence of each block in `ids`, ascending. The values there override
        those at the block's earlier occurrences.
        """
        rows, order = ids.astype(np.intp), np.arange(len(ids), dtype=np.int32)
        self._order[rows] = order
        last: npt.NDArray[np.intp] = (self._order[rows] == order).nonzero()[0]
        return last

    def _replace_ledger(self, blocks: WholeBlocks) -> None:
        """Replace all rows. The columns are written in place if the number of rows is unchanged, so that views remain
        valid.
        """
        if blocks.num_rows == self.num_rows:
            blocks.write_to(self.ledger)
        else:
            self.ledger, self._order = blocks.release_ledger(), np.empty(blocks.num_rows, np.int32)
        self._num_by_state = blocks.counts.copy()


def _check_table_blocks(rows: RequestRows, num_rows: int) -> None:
    blocks = np.frombuffer(rows.table_blocks, "<u4")
    if blocks.size and int(blocks.max()) >= num_rows:
        raise ProtocolError(f"a block table names block {blocks.max()}, the pool has {num_rows} blocks")
