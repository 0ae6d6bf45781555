"""Builds the overview of a whole recording: reads the stored summaries, and computes those that the file lacks.

Decides which seconds are missing. Their summaries are computed by the same code as in a live session. No file stays
open between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.keyframes import bare_snapshot_of
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summarizer import Summarizer
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary, TimedEvent

_PROGRESS_EVERY: Final = 256
_LOOKBACK_NS: Final = 2 * SECOND_NS
"""Missing summaries are computed from this long before the first missing second, so that ongoing prefills and a
stalled engine are known.
"""
_MAX_SUMMARIES: Final = 1_000
"""Maximum number of summaries per part. Hours are read in parts because the caller keeps the overview in a more compact
form.
"""
_MAX_EVENTS: Final = 20_000
"""Maximum number of events per part."""


@dataclass(slots=True)
class OverviewPart:
    summaries: list[Summary] = field(default_factory=list)
    events: list[TimedEvent] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Iterable[OverviewPart]) -> OverviewPart:
        whole = cls()
        for part in parts:
            whole.summaries += part.summaries
            whole.events += part.events
        return whole

    @property
    def is_full(self) -> bool:
        return len(self.summaries) >= _MAX_SUMMARIES or len(self.events) >= _MAX_EVENTS

    @property
    def newest_ns(self) -> int | None:
        """Start time of the part's last second, or None if the part has no summaries."""
        return self.summaries[-1].time_ns if self.summaries else None

    def append_to(self, overview: SessionOverview) -> None:
        overview.extend(self.summaries, self.events)


def written_parts(recording: Recording) -> Iterator[OverviewPart]:
    """Yield the summaries and events stored in the file, in parts of limited size."""
    part = OverviewPart()
    for item in recording.overview_items():
        if isinstance(item, Summary):
            part.summaries.append(item)
        else:
            part.events.append(item)
        if part.is_full:
            yield part
            part = OverviewPart()
    if part.summaries or part.events:
        yield part


def missing_from(recording: Recording, newest_ns: int | None) -> int | None:
    """Return the time from which the overview has to be computed, or None if the file stores all of it.

    Summaries are written in order, a few seconds late. Therefore, a truncated file can lack only those of its end, and
    a file without summaries lacks all.

    Args:
        newest_ns: Start time of the last stored second; None if the file has no summaries.
    """
    if newest_ns is None:
        return recording.start_ns
    covered_ns = newest_ns + SECOND_NS
    return covered_ns if recording.end_ns >= covered_ns else None


def computed_part(
    recording: Recording, from_ns: int, watch: ProgressCallback | None = None, *, until_ns: int | None = None
) -> OverviewPart:
    return OverviewPart.joined(computed_parts(recording, from_ns, watch, until_ns=until_ns))


def computed_parts(
    recording: Recording, from_ns: int, watch: ProgressCallback | None = None, *, until_ns: int | None = None
) -> Iterator[OverviewPart]:
    """Yield the overview from the second at `from_ns` to `until_ns` (or the end), computed from the recorded messages.

    Raises OpeningCancelled when `watch`, which is called with the share done, returns False.
    """
    from_ns -= from_ns % SECOND_NS
    part, follower = OverviewPart(), Follower()
    summarizer = Summarizer(follower)
    begin_s = _resume_from(recording, from_ns - _LOOKBACK_NS, follower, summarizer)
    until_s = ((recording.end_ns if until_ns is None else until_ns) - recording.start_ns) / 1e9
    length_s = max(until_s - begin_s, 1e-9)
    for count, (at_s, message) in enumerate(recording.messages(begin_s, until_s, keyframes=True)):
        if watch is not None and count % _PROGRESS_EVERY == 0 and not watch(min(1.0, (at_s - begin_s) / length_s)):
            raise OpeningCancelled
        summaries = summarizer.add_message(message, recording.start_ns + round(at_s * 1e9))
        part.summaries += [summary for summary in summaries if summary.time_ns >= from_ns]
        part.events += [event for event in summarizer.drain_events() if event.time_ns >= from_ns]
        follower.feed(message)
        if part.is_full:
            yield part
            part = OverviewPart()
    part.summaries += [summary for summary in summarizer.close() if summary.time_ns >= from_ns]
    yield part


def _resume_from(recording: Recording, at_ns: int, follower: Follower, summarizer: Summarizer) -> float:
    """Restore `follower` and `summarizer` to the state before `at_ns`, if that state is recorded. Returns the
    position in seconds from which the caller must feed messages to them; 0 if no state was restored.
    """
    newest_s = None
    if at_ns > recording.start_ns:
        for message_s, message in recording.state_messages((at_ns - 1 - recording.start_ns) / 1e9):
            newest_s = message_s
            follower.feed(message)
    follower.apply_pending()
    if newest_s is None or follower.is_lost:
        return 0.0
    summarizer.resume_from(bare_snapshot_of(follower.mirror), recording.start_ns + round(newest_s * 1e9))
    return max(newest_s, (at_ns - recording.start_ns) / 1e9)


def read_overview(recording: Recording, watch: ProgressCallback | None = None) -> SessionOverview:
    overview = SessionOverview()
    for part in written_parts(recording):
        part.append_to(overview)
    from_ns = missing_from(recording, int(overview.time_ns[-1]) if len(overview) else None)
    if from_ns is not None:
        for part in computed_parts(recording, from_ns, watch):
            part.append_to(overview)
    return overview
