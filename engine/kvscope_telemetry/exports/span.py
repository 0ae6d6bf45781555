"""Time range of a recording that is exported.

Owns the conversion between the two clocks: ranges are given in seconds of the recording, exports use nanoseconds since
1970.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording

_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A time range on the recording's clock, both ends inclusive."""

    start_ns: int
    """Time of second 0 of the recording."""
    from_ns: int
    until_ns: int

    @property
    def length_s(self) -> float:
        return (self.until_ns - self.from_ns) / 1e9

    @property
    def from_s(self) -> float:
        return self.seconds(self.from_ns)

    @property
    def until_s(self) -> float:
        return self.seconds(self.until_ns)

    def seconds(self, time_ns: int) -> float:
        return (time_ns - self.start_ns) / 1e9


def span_of(recording: Recording, from_s: float | None = None, until_s: float | None = None) -> Span:
    """Return the range from `from_s` to `until_s`; None means the start or the end. Raises BadInput if nothing was
    recorded in it.
    """
    length_s = (recording.end_ns - recording.start_ns) / 1e9
    begin = recording.first_s if from_s is None else max(from_s, recording.first_s)
    end = length_s if until_s is None else min(until_s, length_s)
    if begin > length_s:
        raise BadInput(f"nothing to export from {begin:g} s on: the recording is {length_s:.1f} s long")
    if end < begin or (until_s is not None and until_s <= begin):
        raise BadInput(f"the range from {begin:g} s to {end:g} s is empty")
    return Span(recording.start_ns, recording.start_ns + round(begin * 1e9), recording.start_ns + round(end * 1e9))


def timed_messages(
    recording: Recording, span: Span, watch: ProgressCallback | None = None
) -> Iterable[tuple[int, TelemetryMessage]]:
    """Yield the messages from the newest snapshot before the range to its end, with times on the recording's clock.

    `watch` is called with the share read so far, 0 to 1. Raises OpeningCancelled when it returns False.
    """
    begin_s = recording.snapshot_before(span.from_s) or 0.0
    length_s = max(span.until_s - begin_s, 1e-9)
    for count, (at_s, message) in enumerate(recording.messages(begin_s, span.until_s, keyframes=True)):
        if watch is not None and count % _PROGRESS_EVERY == 0 and not watch(min(1.0, (at_s - begin_s) / length_s)):
            raise OpeningCancelled
        yield recording.start_ns + round(at_s * 1e9), message
