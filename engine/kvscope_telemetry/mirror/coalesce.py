"""Merges many frames into one `Update`. The frames' bytes are concatenated first and then become one numpy array per
column.

At 5,000 frames per second, numpy must be called once per column and batch, never once per frame. Owns the order of
entries in an `Update`, and the queue of updates between two threads (`PendingUpdates`). Must not depend on sockets
or on the state to which updates are applied.

See docs/internals/decisions/0004-updates-are-joined-on-a-reader-thread.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, Column, unpack
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Frame,
    Heartbeat,
    MemoryBreakdown,
    Progress,
    Reading,
    RequestRows,
    Snapshot,
)
from kvscope_telemetry.mirror.whole_blocks import WholeBlocks
from kvscope_telemetry.source import SERIES_FIELDS, Update

_Entry = TypeVar("_Entry", bound=np.generic)

_MAX_I64: Final = np.uint64((1 << 63) - 1)


def coalesce(
    frames: Sequence[Frame],
    *,
    snapshot: Snapshot | None = None,
    blocks: WholeBlocks | None = None,
    samples: Sequence[DeviceSample] = (),
    devices: Sequence[Devices] = (),
    memory: MemoryBreakdown | None = None,
    progress: Progress | None = None,
    heartbeat: Heartbeat | None = None,
    readings: Sequence[Reading] = (),
) -> Update:
    """Return one update of validated `frames`, which must be consecutive and of one epoch."""
    ids, columns = _block_rows(frames)
    return Update(
        snapshot=snapshot,
        blocks=blocks,
        block_ids=ids,
        block_columns=columns,
        new_requests=tuple(chain.from_iterable([f.new_requests for f in frames])),
        requests=_request_rows(frames),
        request_time_ns=_request_times(frames),
        series=_series(frames),
        first_token_ns=_times([f.first_token_ns for f in frames]),
        inter_token_ns=_times([f.inter_token_ns for f in frames]),
        evicted=_ids([f.moves.evicted for f in frames]),
        copied=_ids([f.moves.copied for f in frames]),
        saved=_ids([f.moves.saved for f in frames]),
        loaded=_ids([f.moves.loaded for f in frames]),
        events=tuple(chain.from_iterable([f.events for f in frames])),
        counters=frames[-1].counters if frames else None,
        samples=tuple(samples),
        devices=tuple(devices),
        memory=memory,
        progress=progress,
        heartbeat=heartbeat,
        readings=tuple(readings),
    )


def state_after(frames: Sequence[Frame]) -> Update:
    """Return an update with only the data that a mirror needs from `frames` (not empty), and the series row of the last
    frame.
    """
    ids, columns = _block_rows(frames)
    return Update(
        block_ids=ids,
        block_columns=columns,
        new_requests=tuple(chain.from_iterable([f.new_requests for f in frames])),
        requests=_request_rows(frames),
        series=_series(frames[-1:]),
        events=tuple(chain.from_iterable([f.events for f in frames])),
        counters=frames[-1].counters,
    )


def merge(updates: Sequence[Update]) -> Update:
    """Return one update equivalent to `updates` in order. Only the first may contain a snapshot."""
    if len(updates) == 1:
        return updates[0]
    assert all(u.snapshot is None for u in updates[1:]), "a snapshot begins an update, it never joins one"
    updates_with_frames = [u for u in updates if u.series]
    request_rows = tuple(chain.from_iterable([u.requests for u in updates]))
    return Update(
        snapshot=updates[0].snapshot if updates else None,
        blocks=updates[0].blocks if updates else None,
        block_ids=_concatenated([u.block_ids for u in updates], np.dtype(np.uint32)),
        block_columns=_merged_columns([u.block_columns for u in updates if u.block_columns]),
        new_requests=tuple(chain.from_iterable([u.new_requests for u in updates])),
        requests=(merge_request_rows(request_rows),) if request_rows else (),
        request_time_ns=_concatenated([u.request_time_ns for u in updates], np.dtype(np.int64)),
        series=_merged_series([u.series for u in updates_with_frames]),
        first_token_ns=_concatenated([u.first_token_ns for u in updates], np.dtype(np.int64)),
        inter_token_ns=_concatenated([u.inter_token_ns for u in updates], np.dtype(np.int64)),
        evicted=_concatenated([u.evicted for u in updates], np.dtype(np.uint32)),
        copied=_concatenated([u.copied for u in updates], np.dtype(np.uint32)),
        saved=_concatenated([u.saved for u in updates], np.dtype(np.uint32)),
        loaded=_concatenated([u.loaded for u in updates], np.dtype(np.uint32)),
        events=tuple(chain.from_iterable([u.events for u in updates])),
        counters=next((u.counters for u in reversed(updates) if u.counters is not None), None),
        samples=tuple(chain.from_iterable([u.samples for u in updates])),
        devices=tuple(chain.from_iterable([u.devices for u in updates])),
        memory=next((u.memory for u in reversed(updates) if u.memory is not None), None),
        progress=next((u.progress for u in reversed(updates) if u.progress is not None), None),
        heartbeat=next((u.heartbeat for u in reversed(updates) if u.heartbeat is not None), None),
        readings=tuple(chain.from_iterable([u.readings for u in updates])),
    )


def merge_request_rows(rows: Sequence[RequestRows]) -> RequestRows:
    """Merge several messages with changes of requests into one, in the same order. A request may occur more
    than once.
    """
    if len(rows) == 1:
        return rows[0]
    return RequestRows(
        number=b"".join([r.number for r in rows]),
        state=b"".join([r.state for r in rows]),
        num_computed_tokens=b"".join([r.num_computed_tokens for r in rows]),
        num_cached_tokens=b"".join([r.num_cached_tokens for r in rows]),
        num_output_tokens=b"".join([r.num_output_tokens for r in rows]),
        num_preemptions=b"".join([r.num_preemptions for r in rows]),
        table_start=b"".join([r.table_start for r in rows]),
        table_count=b"".join([r.table_count for r in rows]),
        table_blocks=b"".join([r.table_blocks for r in rows]),
        num_draft_tokens=_concatenate_counts([r.num_draft_tokens for r in rows], rows),
        num_accepted_tokens=_concatenate_counts([r.num_accepted_tokens for r in rows], rows),
        table_group=_concatenate_counts([r.table_group for r in rows], rows),
        waits_for=_concatenate_counts([r.waits_for for r in rows], rows),
    )


def _concatenate_counts(columns: Sequence[bytes], rows: Sequence[RequestRows]) -> bytes:
    """Concatenate an optional column of several `RequestRows`. Where the column is empty, zeros are inserted,
    unless it is empty in all of them.
    """
    if not any(columns):
        return b""
    return b"".join([column or bytes(len(r.number)) for column, r in zip(columns, rows, strict=True)])


def size_of(update: Update) -> int:
    """Return the number of entries in an update, by which the queue `PendingUpdates` is bounded."""
    request_bytes = sum(len(r.number) + len(r.table_blocks) for r in update.requests)
    num_frames = len(update.series["seq"]) if update.series else 0
    num_times = len(update.first_token_ns) + len(update.inter_token_ns)
    num_others = len(update.new_requests) + len(update.events) + len(update.readings)
    num_others += len(update.samples) + len(update.devices)
    num_moved = len(update.evicted) + len(update.copied) + len(update.saved) + len(update.loaded)
    return len(update.block_ids) + request_bytes // 4 + num_frames + num_times + num_others + num_moved


def _block_rows(frames: Sequence[Frame]) -> tuple[npt.NDArray[np.uint32], Mapping[str, Column]]:
    rows = [f.blocks for f in frames if f.blocks.ids]
    if not rows:
        return np.empty(0, np.uint32), {}
    ids = np.frombuffer(b"".join([r.ids for r in rows]), "<u4")
    return ids, unpack(rows)


def _request_rows(frames: Sequence[Frame]) -> tuple[RequestRows, ...]:
    rows = [f.requests for f in frames if f.requests.number]
    return (merge_request_rows(rows),) if rows else ()


def _request_times(frames: Sequence[Frame]) -> npt.NDArray[np.int64]:
    counts = [len(f.requests.number) // 4 for f in frames]
    return np.repeat(np.array([f.time_ns for f in frames], np.int64), counts)


def _series(frames: Sequence[Frame]) -> Mapping[str, npt.NDArray[np.int64]]:
    if not frames:
        return {}
    table = np.array([_series_row(frame) for frame in frames], np.int64).T.copy()
    return dict(zip(SERIES_FIELDS, table, strict=True))


def _series_row(frame: Frame) -> tuple[int, ...]:
    batch, timings, counters = frame.batch, frame.timings, frame.counters
    return (
        frame.time_ns,
        frame.seq,
        frame.step,
        batch.num_prefill_tokens,
        batch.num_decode_tokens,
        counters.num_running,
        counters.num_waiting,
        len(batch.number) // 4,
        timings.schedule_ns,
        timings.run_ns,
        timings.forward_ns,
        timings.commit_ns,
        timings.record_ns,
        frame.work.flops,
        frame.work.num_bytes,
        counters.preemptions,
        counters.generation_tokens,
        counters.prompt_tokens,
        counters.cached_tokens,
    )


def _ids(parts: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(b"".join(parts), "<u4")


def _times(parts: Sequence[bytes]) -> npt.NDArray[np.int64]:
    data = b"".join(parts)
    if not data:
        return np.empty(0, np.int64)
    bounded: npt.NDArray[np.uint64] = np.minimum(np.frombuffer(data, "<u8"), _MAX_I64)
    return bounded.astype(np.int64)


def _concatenated(parts: Sequence[npt.NDArray[_Entry]], dtype: np.dtype[_Entry]) -> npt.NDArray[_Entry]:
    parts = [part for part in parts if part.size]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _merged_columns(columns: Sequence[Mapping[str, Column]]) -> Mapping[str, Column]:
    if not columns:
        return {}
    return {name: np.concatenate([c[name] for c in columns]) for name in COLUMNS}


def _merged_series(
    series: Sequence[Mapping[str, npt.NDArray[np.int64]]],
) -> Mapping[str, npt.NDArray[np.int64]]:
    if not series:
        return {}
    return {name: np.concatenate([s[name] for s in series]) for name in SERIES_FIELDS}


MAX_ENTRIES: Final = 2_000_000
"""Maximum number of pending changed blocks, requests, frames and events: about 70 MB, or ten seconds at 5,000 frames/s.
"""
ENTRY_BYTES: Final = 32
"""Bytes on the wire per entry: an update counts as at least its size divided by this. Otherwise, names and
texts of any length would count little.
"""


class PendingUpdates:
    """Bounded queue of updates between the reading thread and a consumer.

    Both threads may use it at any time without waiting. If the consumer is too slow, all queued updates are dropped.
    Further updates with frames are then dropped until a snapshot arrives, because they do not fit the consumer's state,
    which lacks the dropped updates.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.num_frames_discarded = 0
        self._max_entries = max_entries
        self._updates: deque[tuple[Update, int]] = deque()
        self._num_entries = 0
        self._needs_snapshot = False
        self._has_overflowed = False
        self._lock = threading.Lock()

    def put(self, update: Update, num_bytes: int = 0) -> None:
        """Append an update that has `num_bytes` on the wire. An update with frames is dropped while a snapshot
        is needed.
        """
        num_entries = max(1 + size_of(update), num_bytes // ENTRY_BYTES)
        with self._lock:
            if update.snapshot is not None:
                self._needs_snapshot = self._has_overflowed = False
            elif self._needs_snapshot and update.series:
                self.num_frames_discarded += len(update.series["seq"])
                return
            self._updates.append((update, num_entries))
            self._num_entries += num_entries
            if self._num_entries > self._max_entries and len(self._updates) > 1:
                self._discard()
                self._has_overflowed = True

    def poll_update(self) -> Update | None:
        """Remove all updates before the next snapshot and return them merged. A snapshot always begins the
        update that is returned by the next call.
        """
        with self._lock:
            ready: list[Update] = []
            while self._updates and not (ready and self._updates[0][0].snapshot is not None):
                update, num_entries = self._updates.popleft()
                ready.append(update)
                self._num_entries -= num_entries
        return merge(ready) if ready else None

    def discard(self) -> None:
        """Drop all updates because the state before them is lost. Only a snapshot is accepted next."""
        with self._lock:
            self._discard()

    def pop_overflow(self) -> bool:
        """Return whether an overflow occurred since the last call, after which a snapshot must be requested."""
        with self._lock:
            has_overflowed, self._has_overflowed = self._has_overflowed, False
            return has_overflowed

    def _discard(self) -> None:
        self.num_frames_discarded += sum(len(u.series["seq"]) for u, _ in self._updates if u.series)
        self._updates.clear()
        self._num_entries = 0
        self._needs_snapshot = True
