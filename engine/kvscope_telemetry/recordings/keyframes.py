"""Keyframes: the whole state every few seconds of recorded time, so that seeking need not begin at the start.

Owns when one is due. It is made from the messages that are recorded, so that recording asks nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.request_words import RequestState
from kvscope_telemetry.messages.telemetry import Frame, Hello, RequestInfo, Snapshot, TelemetryMessage
from kvscope_telemetry.recordings.bundles.listed_keyframes import MAX_LISTED_ROWS, WholeState
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.request_mirror import RequestMirror

INTERVAL_NS: Final = 10_000_000_000
LEAP_SHARE: Final = 0.5
"""A keyframe is due when the leaps since the last have so many rows for each of the state. With a larger share files
would be smaller, and a seek would read more leaps: some 40 of them at most now, a third of a millisecond each."""
LARGE_LEAP_SHARE: Final = 1.0
"""Of a state of more rows than are listed: a keyframe of them takes some times the room and time."""
SMALL_ROWS: Final = 2000
"""A keyframe of no more is written whenever it is time."""


@dataclass(frozen=True, slots=True)
class Keyframe:
    """The whole state after frame `seq`."""

    hello: Hello
    seq: int
    state: WholeState
    """It must not change before it is written."""


class Keyframes:
    """Says when a keyframe belongs after what is recorded; `follower` is fed with it first.

    One is due `interval_ns` after the last, once the leaps since say enough: so keyframes never make up much more of a
    file than these, and no seek reads more than one of each.
    """

    def __init__(self, follower: Follower, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._follower = follower
        self._last_ns = 0
        self._num_rows = 0

    def leapt(self, leap: Leap) -> None:
        """One was written."""
        self._num_rows += len(leap.blocks.state)  # a state is a byte

    def after(self, message: TelemetryMessage, log_time_ns: int) -> Keyframe | None:
        """The keyframe that follows `message`, None when none is due."""
        if not isinstance(message, Frame):
            if isinstance(message, Snapshot):
                self._restart(log_time_ns)
            return None
        if log_time_ns - self._last_ns < self._interval_ns or self._is_early:
            return None
        return self.now(log_time_ns)

    def now(self, log_time_ns: int) -> Keyframe | None:
        """A keyframe, due or not; None where the state is not known."""
        self._follower.settle()
        if self._follower.is_lost:
            return None
        self._restart(log_time_ns)
        mirror = self._follower.mirror
        state = state_of(mirror)
        return Keyframe(state.snapshot.hello, state.snapshot.seq, state)

    @property
    def _is_early(self) -> bool:
        num_rows = self._follower.mirror.num_rows
        share = LEAP_SHARE if num_rows <= MAX_LISTED_ROWS else LARGE_LEAP_SHARE
        return self._num_rows < share * num_rows - SMALL_ROWS

    def _restart(self, log_time_ns: int) -> None:
        self._last_ns, self._num_rows = log_time_ns, 0


def snapshot_of(mirror: Mirror) -> Snapshot:
    """The state of `mirror`, which has one, as an engine would tell it: requests that ended are not in it."""
    return msgspec.structs.replace(bare_snapshot_of(mirror), blocks=mirror.ledger.pack_all())


def state_of(mirror: Mirror) -> WholeState:
    """The same, to be written as a keyframe is."""
    return WholeState(bare_snapshot_of(mirror), mirror.ledger)


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
    )
