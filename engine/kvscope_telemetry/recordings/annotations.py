"""What a recording has besides what came: keyframes and leaps for seeking, summaries and events for a glance.

Owns the state that it is made from, and when it is written: these where they belong, the rest some seconds at once,
so that it lies in chunks of its own and a file's whole course is read without its frames. Knows no file.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.pieces import Pieces
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.bundles.packed_leaps import pack_leap
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS, Keyframes
from kvscope_telemetry.recordings.layout import EVENTS, KEYFRAMES, LEAPS, STATE, SUMMARIES
from kvscope_telemetry.recordings.leaps import Leaps
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.summaries.summarizer import Summarizer
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.summaries.summary import encode as encode_json

GLANCE_EVERY_NS: Final = 10_000_000_000
MAX_GLANCE_BYTES: Final = 1 << 20
"""As much of it may wait, or those seconds."""

Entry = tuple[int, int, bytes]
"""Channel, log time in ns, data."""
StateEntry = tuple[int, int, bytes | Pieces]
"""The same; a keyframe is in pieces, to be written before the next message is added."""


class Annotations:
    """Call `add` with every message as it is recorded; take from `glance` what is due after it."""

    def __init__(self, keyframe_interval_ns: int = INTERVAL_NS) -> None:
        self.follower = Follower()
        self._keyframes = Keyframes(self.follower, keyframe_interval_ns)
        self._leaps = Leaps(self.follower)
        self._summarizer = Summarizer(self.follower)
        self._waiting: list[Entry] = []
        self._num_waiting_bytes = 0
        self._since_ns = 0
        self.new: list[Summary | TimedEvent] = []
        """Since somebody emptied it."""

    def add(self, message: TelemetryMessage, log_time_ns: int) -> StateEntry | None:
        """`message` was written; the keyframe or leap that belongs after it, if one does."""
        for summary in self._summarizer.add(message, log_time_ns):
            self._note_summary(summary)
        for event in self._summarizer.take_events():
            self._note_event(event)
        self.follower.feed(message)
        keyframe = self._keyframes.after(message, log_time_ns)
        if keyframe is not None:
            self._leaps.restart(keyframe.seq, log_time_ns)
            return KEYFRAMES, log_time_ns, keyframe.pieces
        leap = self._leaps.after(message, log_time_ns)
        if leap is None:
            return None
        data = pack_leap(leap)
        self._keyframes.leapt(len(data) + len(leap.blocks.parent))
        return LEAPS, log_time_ns, data

    def glance(self, *, is_due: bool = False, at_end: bool = False) -> list[Entry]:
        """Summaries and events that are due, or said to be, to be written together; empty while none are."""
        if at_end:
            for summary in self._summarizer.close():
                self._note_summary(summary)
        elif not (is_due or self._is_due):
            return []
        due, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        return sorted(due, key=lambda entry: entry[1])

    def restate(self, log_time_ns: int) -> list[StateEntry]:
        """What a file begins with that goes on from here: a hello and the whole state; empty where it is not known."""
        keyframe = self._keyframes.now(log_time_ns)
        if keyframe is None:
            return []
        self._summarizer.restate()
        self._leaps.restart(keyframe.seq, log_time_ns)
        return [(STATE, log_time_ns, encode(keyframe.hello)), (KEYFRAMES, log_time_ns, keyframe.pieces)]

    @property
    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        return self._waiting[-1][1] - self._since_ns >= GLANCE_EVERY_NS or self._num_waiting_bytes >= MAX_GLANCE_BYTES

    def _note_summary(self, summary: Summary) -> None:
        self.new.append(summary)
        self._wait(SUMMARIES, summary.time_ns, encode_json(summary))

    def _note_event(self, event: TimedEvent) -> None:
        self.new.append(event)
        self._wait(EVENTS, event.time_ns, encode_json(event))

    def _wait(self, channel: int, time_ns: int, data: bytes) -> None:
        if not self._waiting:
            self._since_ns = time_ns
        self._waiting.append((channel, max(time_ns, 0), data))
        self._num_waiting_bytes += len(data)
