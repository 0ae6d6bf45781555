"""Where seeking begins: keyframes, the whole state, and delta checkpoints, what changed since the last of either.

Owns when one is due. Both are made from the messages that are recorded, so that recording asks nothing of the engine.
A state is a keyframe, the delta checkpoints after it and at most two seconds of frames. Delta checkpoints go on past
keyframes: each change is told twice, by its frame and by one of them, and a damaged second costs no more than itself.
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
from kvscope_telemetry.recordings.columns import Columns, ColumnsInRow
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.request_mirror import RequestMirror

INTERVAL_NS: Final = 10_000_000_000
KEYFRAME_SHARE: Final = 1.6
"""A keyframe is due when the delta checkpoints since the last have so many rows for each of the state. With a larger
share files would be smaller, and a seek would read more delta checkpoints."""
SMALL_ROWS: Final = 2000
"""A keyframe of no more is written whenever it is time."""
CHECKPOINT_NS: Final = 1_800_000_000
CHECKPOINT_FRAMES: Final = 400
"""A delta checkpoint is due after so much time (two batches of frames), or so many frames. With longer ones a
seek would be quicker, and a damaged second cost more of those around it."""


class Keyframes:
    """Call `after` with every message, once `follower` was fed with it."""

    def __init__(self, follower: Follower, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._follower = follower
        self._keyframe_ns = self._newest_ns = 0
        self._num_rows = 0  # in delta checkpoints since the last keyframe
        self._is_lost = True
        self._begin_checkpoint(0, 0)

    def after(self, message: TelemetryMessage, log_time_ns: int) -> list[Snapshot | DeltaCheckpoint]:
        """The delta checkpoint that belongs after `message`, and the keyframe; mostly neither is due."""
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
        """A keyframe, due or not; None where the state is not known."""
        self._follower.settle()
        if self._follower.is_lost:
            return None
        state = snapshot_of(self._follower.mirror)
        self._is_lost = False
        self._restart(state.seq, log_time_ns)
        return state

    def checkpoint(self) -> DeltaCheckpoint | None:
        """What changed since the last, due or not; None where nothing did, or the state is not known."""
        if not self._frames or self._is_lost:
            return None
        self._follower.settle()
        self._is_lost = self._follower.is_lost
        if self._is_lost:
            return None
        checkpoint = _joined(self._frames, self._since_seq, self._follower.mirror)
        self._num_rows += len(checkpoint.blocks.state)  # a state is a byte
        self._begin_checkpoint(checkpoint.seq, self._newest_ns)
        return checkpoint

    def _is_keyframe_due(self, log_time_ns: int) -> bool:
        is_time = log_time_ns - self._keyframe_ns >= self._interval_ns
        return is_time and self._num_rows >= KEYFRAME_SHARE * self._follower.mirror.num_rows - SMALL_ROWS

    def _restart(self, seq: int, log_time_ns: int) -> None:
        """The state after frame `seq` is in the recording."""
        self._keyframe_ns, self._num_rows = log_time_ns, 0
        self._begin_checkpoint(seq, log_time_ns)

    def _begin_checkpoint(self, seq: int, log_time_ns: int) -> None:
        self._since_seq, self._since_ns = seq, log_time_ns
        self._frames: list[Frame] = []


def joined_checkpoints(parts: Sequence[Columns]) -> DeltaCheckpoint:
    """Delta checkpoints that follow one another, as one. Raises ProtocolError."""
    columns, first, last = ColumnsInRow(parts), parts[0], parts[-1]
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
    """The state of `mirror`, which has one, as an engine would tell it: requests that ended are not in it."""
    return msgspec.structs.replace(bare_snapshot_of(mirror), blocks=mirror.ledger.pack_all())


def bare_snapshot_of(mirror: Mirror) -> Snapshot:
    """The same without its blocks."""
    assert mirror.hello is not None, "a mirror without a hello has no state"
    requests = mirror.requests
    rows = np.flatnonzero(requests.state != RequestState.FINISHED)
    return Snapshot(
        hello=mirror.hello,
        seq=mirror.seq,
        step=mirror.step,
        time_ns=mirror.time_ns,
        blocks=BlockRows(),
        requests_info=tuple(_info(requests, row) for row in rows.tolist()),
        requests=requests.pack(rows, np.zeros(len(rows), np.int64)),
        counters=mirror.counters,
        stops=mirror.stops.since(int(min(requests.arrival_ns[rows], default=mirror.time_ns))),
    )


def _info(requests: RequestMirror, row: int) -> RequestInfo:
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


def _joined(frames: list[Frame], since_seq: int, mirror: Mirror) -> DeltaCheckpoint:
    """`frames`, after which the state is that of `mirror`."""
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
        requests=_rows_of(mirror.requests, [frame.requests for frame in frames]),
        counters=last.counters,
    )


def _rows_of(requests: RequestMirror, changes: list[RequestRows]) -> RequestRows:
    """How the requests of `changes` stand: of their block tables what may have changed, each once."""
    numbers = np.frombuffer(b"".join([rows.number for rows in changes]), "<u4").astype(np.int64)
    starts = np.frombuffer(b"".join([rows.table_start for rows in changes]), "<u4").astype(np.int64)
    touched, inverse = np.unique(numbers, return_inverse=True)
    first = np.full(touched.size, np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, starts)
    found = [(requests.row_of(number), start) for number, start in zip(touched.tolist(), first.tolist(), strict=True)]
    known = [(row, start) for row, start in found if row is not None]  # others ended and are forgotten
    rows = np.array([row for row, _ in known], np.intp)
    kept = np.array([start for _, start in known], np.int64)
    return requests.pack(rows, np.minimum(kept, requests.num_blocks[rows]))
