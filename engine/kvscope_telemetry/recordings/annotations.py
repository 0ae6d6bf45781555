"""What a recording has besides what came: keyframes and leaps for seeking, summaries and events for a glance.

Owns the state that it is made from, and when it is written: these where they belong, the rest some seconds at once,
so that it lies in chunks of its own and a file's whole course is read without its frames. Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.bundles.listed_keyframes import WholeState
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS, Keyframes
from kvscope_telemetry.recordings.layout import EVENT_LISTS, KEYFRAMES, LEAPS, STATE, SUMMARIES
from kvscope_telemetry.recordings.leaps import Leaps
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.summaries.summarizer import Summarizer
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, join_events
from kvscope_telemetry.summaries.summary import encode as encode_json

GLANCE_EVERY_NS: Final = 10_000_000_000
MAX_GLANCE_BYTES: Final = 1 << 20
"""As much of it may wait, or those seconds."""

MAX_LISTED: Final = 1_000
"""Events of a list."""

Entry = tuple[int, int, bytes]
"""Channel, log time in ns, data."""
StateEntry = tuple[int, int, bytes | WholeState | Leap]
"""The same; leaps and keyframes as they are, to be written before the next message is added."""


class Annotations:
    """Call `add` with every message as it is recorded; take from `glance` what is due after it."""

    def __init__(self, keyframe_interval_ns: int = INTERVAL_NS) -> None:
        self.follower = Follower()
        self._keyframes = Keyframes(self.follower, keyframe_interval_ns)
        self._leaps = Leaps(self.follower)
        self._summarizer = Summarizer(self.follower)
        self._waiting: list[Entry] = []
        self._waiting_events: list[tuple[int, bytes]] = []  # log time, JSON
        self._num_waiting_bytes = 0
        self._since_ns = self._newest_ns = 0
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
            return KEYFRAMES, log_time_ns, keyframe.state
        leap = self._leaps.after(message, log_time_ns)
        return None if leap is None else self._leapt(leap, log_time_ns)

    def last_leap(self, log_time_ns: int) -> StateEntry | None:
        """The leap to where the state is now, before something else goes on from there; None where there is one."""
        leap = self._leaps.now()
        return None if leap is None else self._leapt(leap, log_time_ns)

    def glance(self, *, is_due: bool = False, at_end: bool = False) -> list[Entry]:
        """Summaries and events that are due, or said to be, to be written together; empty while none are."""
        if at_end:
            for summary in self._summarizer.close():
                self._note_summary(summary)
        elif not (is_due or self._is_due):
            return []
        due = sorted(self._waiting, key=lambda entry: entry[1]) + _together(self._waiting_events)
        self._waiting, self._waiting_events, self._num_waiting_bytes = [], [], 0
        return due

    def restate(self, log_time_ns: int) -> list[StateEntry]:
        """What a file begins with that goes on from here: a hello and the whole state; empty where it is not known."""
        keyframe = self._keyframes.now(log_time_ns)
        if keyframe is None:
            return []
        self._summarizer.restate()
        self._leaps.restart(keyframe.seq, log_time_ns)
        return [(STATE, log_time_ns, encode(keyframe.hello)), (KEYFRAMES, log_time_ns, keyframe.state)]

    def _leapt(self, leap: Leap, log_time_ns: int) -> StateEntry:
        self._keyframes.leapt(leap)
        return LEAPS, log_time_ns, leap

    @property
    def _is_due(self) -> bool:
        if not self._num_waiting_bytes:
            return False
        return self._newest_ns - self._since_ns >= GLANCE_EVERY_NS or self._num_waiting_bytes >= MAX_GLANCE_BYTES

    def _note_summary(self, summary: Summary) -> None:
        self.new.append(summary)
        data = encode_json(summary)
        self._wait(summary.time_ns, len(data))
        self._waiting.append((SUMMARIES, max(summary.time_ns, 0), data))

    def _note_event(self, event: TimedEvent) -> None:
        self.new.append(event)
        data = encode_json(event)
        self._wait(event.time_ns, len(data))
        self._waiting_events.append((max(event.time_ns, 0), data))

    def _wait(self, time_ns: int, num_bytes: int) -> None:
        if not self._num_waiting_bytes:
            self._since_ns = time_ns
        self._newest_ns = time_ns
        self._num_waiting_bytes += num_bytes


def glance_entries(told: Iterable[Summary | TimedEvent]) -> list[Entry]:
    """Summaries and events as they are written together."""
    summaries: list[Entry] = []
    events: list[tuple[int, bytes]] = []
    for item in told:
        if isinstance(item, Summary):
            summaries.append((SUMMARIES, max(item.time_ns, 0), encode_json(item)))
        else:
            events.append((max(item.time_ns, 0), encode_json(item)))
    return sorted(summaries, key=lambda entry: entry[1]) + _together(events)


def _together(events: list[tuple[int, bytes]]) -> list[Entry]:
    """As lists, each at the time of its newest: who asks from a time on looks where that is not over."""
    in_order = sorted(events, key=lambda event: event[0])
    lists = [in_order[begin : begin + MAX_LISTED] for begin in range(0, len(in_order), MAX_LISTED)]
    return [(EVENT_LISTS, some[-1][0], join_events(data for _, data in some)) for some in lists]
