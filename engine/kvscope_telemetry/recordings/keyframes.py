"""Creates the seek points of a recording: keyframes (complete states) and delta checkpoints (changes since the previous
seek point). Reading: `reader.Segment.state_messages`.

Owns the decision when a seek point is due. Seek points are derived from the recorded messages, so they cost the engine
nothing. A state is restored from a keyframe, the delta checkpoints after it, and at most two seconds of frames. Each
change is stored twice, in its frame and in a delta checkpoint, so a damaged second does not affect later ones. For the
same reason, the frames before a keyframe are covered by a delta checkpoint, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Counters,
    DeltaCheckpoint,
    Frame,
    RequestInfo,
    RequestRows,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import RequestMirror
from kvscope_telemetry.recordings.columns import Columns, MergedColumns

INTERVAL_NS: Final = 10_000_000_000
KEYFRAME_SHARE: Final = 1.6
"""Minimum number of delta checkpoints' rows since the last keyframe, per row of the state, at which a keyframe
is due. A larger value makes files smaller, but a seek reads more delta checkpoints.
"""
SMALL_ROWS: Final = 2000
"""Number by which the rows that `KEYFRAME_SHARE` requires are reduced. A state of up to `SMALL_ROWS /
KEYFRAME_SHARE` rows thus gets a keyframe after each minimum interval, however few rows changed.
"""
CHECKPOINT_NS: Final = 1_800_000_000
CHECKPOINT_FRAMES: Final = 400
"""A delta checkpoint is due after this many frames or after `CHECKPOINT_NS` (two batches of frames). Larger
values make seeks faster. However, after damaged frames the state is unknown until the end of the delta
checkpoint that covers them.
"""


class Keyframes:
    """Decides when keyframes and delta checkpoints are due, and creates them.

    Call `add_message` with every message, once `follower` has processed it.
    """

    def __init__(self, follower: Follower, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._follower = follower
        self._keyframe_ns = self._newest_ns = 0
        self._num_rows = 0  # in delta checkpoints since the last keyframe
        self._is_lost = True
        self._start_checkpoint(0, 0)

    def add_message(self, message: TelemetryMessage, log_time_ns: int) -> list[Snapshot | DeltaCheckpoint]:
        """Return the delta checkpoint and the keyframe that are due after `message`; usually empty."""
        if isinstance(message, Snapshot):
            self._is_lost = False
            self._restart(message.seq, log_time_ns)
        elif isinstance(message, Frame) and not self._follower.is_lost:
            if not self._is_lost:
                self._frames.append(message)
                self._newest_ns = log_time_ns
            if self._is_keyframe_due(log_time_ns):
                return [state for state in (self.checkpoint(), self.keyframe(log_time_ns)) if state is not None]
            if len(self._frames) >= CHECKPOINT_FRAMES or log_time_ns - self._since_ns >= CHECKPOINT_NS:
                checkpoint = self.checkpoint()
                return [] if checkpoint is None else [checkpoint]
        return []

    def keyframe(self, log_time_ns: int) -> Snapshot | None:
        """Return a keyframe, whether or not one is due; None if the state is unknown."""
        self._follower.apply_pending()
        if self._follower.is_lost:
            return None
        state = snapshot_of(self._follower.mirror)
        self._is_lost = False
        self._restart(state.seq, log_time_ns)
        return state

    def checkpoint(self) -> DeltaCheckpoint | None:
        """Return the changes since the last checkpoint, whether or not one is due; None if there are none or the state
        is unknown.
        """
        if not self._frames or self._is_lost:
            return None
        self._follower.apply_pending()
        self._is_lost = self._follower.is_lost
        if self._is_lost:
            return None
        checkpoint = _merged_frames(self._frames, self._since_seq, self._follower.mirror)
        self._num_rows += len(checkpoint.blocks.state)  # one byte per row
        self._start_checkpoint(checkpoint.seq, self._newest_ns)
        return checkpoint

    def _is_keyframe_due(self, log_time_ns: int) -> bool:
        has_interval_passed = log_time_ns - self._keyframe_ns >= self._interval_ns
        return has_interval_passed and self._num_rows >= KEYFRAME_SHARE * self._follower.mirror.num_rows - SMALL_ROWS

    def _restart(self, seq: int, log_time_ns: int) -> None:
        self._keyframe_ns, self._num_rows = log_time_ns, 0
        self._start_checkpoint(seq, log_time_ns)

    def _start_checkpoint(self, seq: int, log_time_ns: int) -> None:
        self._since_seq, self._since_ns = seq, log_time_ns
        self._frames: list[Frame] = []


def joined_checkpoints(parts: Sequence[Columns]) -> DeltaCheckpoint:
    """Merge consecutive delta checkpoints into one. Raises ProtocolError."""
    columns, first, last = MergedColumns(parts), parts[0], parts[-1]
    epoch, seq, step, time_ns = (last.number(name) for name in ("epoch", "seq", "step", "time_ns"))
    return DeltaCheckpoint(
        epoch=epoch,
        seq=seq,
        since_seq=first.number("since_seq"),
        step=step,
        time_ns=time_ns,
        blocks=columns.table(BlockRows, "blocks"),
        requests=columns.table(RequestRows, "requests"),
        new_requests=tuple(chain.from_iterable(columns.objects(DeltaCheckpoint, "new_requests"))),
        counters=last.table(Counters, "counters"),
    )


def snapshot_of(mirror: Mirror) -> Snapshot:
    """Return the state of `mirror` as an engine would publish it, without finished requests. The mirror must have a
    state.
    """
    return msgspec.structs.replace(bare_snapshot_of(mirror), blocks=mirror.ledger.pack_all())


def bare_snapshot_of(mirror: Mirror) -> Snapshot:
    """Return the state of `mirror` like `snapshot_of`, but without blocks."""
    assert mirror.hello is not None, "a mirror without a hello has no state"
    requests = mirror.requests
    rows = np.flatnonzero(requests.state != RequestState.FINISHED)
    return Snapshot(
        hello=mirror.hello,
        seq=mirror.seq,
        step=mirror.step,
        time_ns=mirror.time_ns,
        blocks=BlockRows(),
        requests_info=tuple(_request_info(requests, row) for row in rows.tolist()),
        requests=requests.pack(rows, np.zeros(len(rows), np.int64)),
        counters=mirror.counters,
        stops=mirror.stops.since(int(min(requests.arrival_ns[rows], default=mirror.time_ns))),
    )


def _request_info(requests: RequestMirror, row: int) -> RequestInfo:
    return RequestInfo(
        number=int(requests.number[row]),
        request_id=requests.request_ids[row],
        arrival_ns=int(requests.arrival_ns[row]),
        num_prompt_tokens=int(requests.num_prompt_tokens[row]),
        max_tokens=int(requests.max_tokens[row]),
        priority=int(requests.priority[row]),
        index=int(requests.index[row]),
        adapter=requests.adapters[row],
        client=int(requests.client[row]),
    )


def _merged_frames(frames: list[Frame], since_seq: int, mirror: Mirror) -> DeltaCheckpoint:
    """Merge `frames` into a delta checkpoint. `mirror` holds the state after the last of them."""
    last = frames[-1]
    ids = np.unique(np.frombuffer(b"".join([frame.blocks.ids for frame in frames]), "<u4"))
    return DeltaCheckpoint(
        epoch=last.epoch,
        seq=last.seq,
        since_seq=since_seq,
        step=last.step,
        time_ns=last.time_ns,
        blocks=mirror.ledger.pack(ids),
        new_requests=tuple(chain.from_iterable([frame.new_requests for frame in frames])),
        requests=_request_rows(mirror.requests, [frame.requests for frame in frames]),
        counters=last.counters,
    )


def _request_rows(requests: RequestMirror, changes: list[RequestRows]) -> RequestRows:
    """Return the current rows of the requests in `changes`, each once, with the part of its block table that may have
    changed.
    """
    numbers = np.frombuffer(b"".join([rows.number for rows in changes]), "<u4").astype(np.int64)
    starts = np.frombuffer(b"".join([rows.table_start for rows in changes]), "<u4").astype(np.int64)
    changed_numbers, inverse = np.unique(numbers, return_inverse=True)
    first_starts = np.full(changed_numbers.size, np.iinfo(np.int64).max)
    np.minimum.at(first_starts, inverse, starts)
    rows_and_starts = [
        (requests.row_of(number), start)
        for number, start in zip(changed_numbers.tolist(), first_starts.tolist(), strict=True)
    ]
    # Requests without a row have finished and been removed.
    present = [(row, start) for row, start in rows_and_starts if row is not None]
    rows = np.array([row for row, _ in present], np.intp)
    present_starts = np.array([start for _, start in present], np.int64)
    return requests.pack(rows, np.minimum(present_starts, requests.num_blocks[rows]))
