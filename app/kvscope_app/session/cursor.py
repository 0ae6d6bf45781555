"""The cursor of a live session away from its end: a frozen copy of what was shown, then what was kept, played.

Owns that copy, the second mirror's viewpoint, and where it was told to go while the ring's recording opens; nothing
while the session is live. Knows no Qt and nobody who looks.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import TYPE_CHECKING

from kvscope_app.session.background import Background
from kvscope_app.session.links import Player
from kvscope_app.session.viewpoint import Viewpoint
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import TimedEvent

if TYPE_CHECKING:
    from kvscope_app.session.kept.kept_timeline import KeptTimeline
    from kvscope_telemetry.playback.playback_source import PlaybackSource
    from kvscope_telemetry.timeline.ring_recording import RingRecording


class Cursor:
    """At the end; away from it between `stand` and `come_back`, on a ring recording of its own after `go_to`."""

    def __init__(self, overview: SessionOverview) -> None:
        self.is_away = False
        """Whether it is not at the end."""
        self.stood_ns = 0
        """Our monotonic time of when it left the end."""
        self.frozen: Mirror | None = None
        """What was shown then."""
        self.point: Viewpoint | None = None
        self.wanted_ns: int | None = None
        """Where it was told to go while the ring's recording opens, by the wall clock."""
        self._wanted_event: tuple[TimedEvent, bool] | None = None
        """The event that was there, and whether the state before it is wanted."""
        self.wants_play = False
        """Whether it is to go on from there."""
        self.wanted_seq: int | None = None
        """The frame to be at, told before the ring's recording was open."""
        self._overview = overview
        self._opening: Background[RingRecording] | None = None
        self._source: PlaybackSource | None = None

    @property
    def player(self) -> Player | None:
        """Once it is open."""
        return self._source

    @property
    def is_opening(self) -> bool:
        """Whether the ring's recording is being opened."""
        return self._opening is not None

    @property
    def is_seeking(self) -> bool:
        """Whether what there is to take is not yet of the position."""
        return self._source is not None and self._source.is_seeking

    @property
    def reached(self) -> Viewpoint | None:
        """The place on the ring's recording, once there is something to show of it."""
        return self.point if self.point is not None and self.point.has_state else None

    def stand(self, mirror: Mirror) -> None:
        """Leave the end: from now on a copy of `mirror`, as it is, is what is shown."""
        self.frozen = copy.deepcopy(mirror)
        self.stood_ns = time.monotonic_ns()
        self.is_away = True

    def come_back(self) -> None:
        """Be at the end again."""
        self.close()
        self.frozen, self.is_away = None, False

    def go_to(self, time_ns: int, kept: KeptTimeline, event: TimedEvent | None = None, *, before: bool = False) -> None:
        """Be at `time_ns`, by the wall clock; later, where the ring's recording must be opened first. With an `event`:
        at the frame that tells it, or `before` that."""
        self.wanted_seq = None
        self._wanted_event = None if event is None else (event, before)
        if self._source is not None:
            self._seek(self._source, time_ns)
            return
        self.wanted_ns = time_ns
        if self._opening is None:
            self._opening = kept.open_ring_recording()

    def take_opened(self, speed: float) -> str:
        """Once the ring's recording is open, go where it was told to; returns why it cannot be opened, else empty."""
        opening = self._opening
        if opening is None or not opening.is_over:
            return ""
        self._opening = None
        ring_recording, time_ns = opening.made, self.wanted_ns
        self.wanted_ns = None
        if ring_recording is None or time_ns is None:
            self.wants_play, self.wanted_seq = False, None
            return opening.failure
        from kvscope_telemetry.playback.playback_source import PlaybackSource  # who stays live needs none of it

        source = PlaybackSource(ring_recording, is_playing=False)
        self._seek(source, time_ns)
        source.set_speed(speed)
        self._source = source
        self.point = Viewpoint(source, self._overview, source)
        if self.wants_play:
            source.play()
        self.wants_play = False
        return ""

    def _seek(self, source: PlaybackSource, time_ns: int) -> None:
        seconds, told = (time_ns - source.recording.start_ns) / 1e9, self._wanted_event
        if told is None:
            source.seek(seconds, with_past=False)
        else:
            source.seek_event(seconds, told[0].event, before=told[1])

    def take_failure(self) -> str:
        """Why the ring's recording cannot be read any further, once; else empty. What is shown stays; the next jump
        opens it anew."""
        source = self._source
        if source is None or not source.failure:
            return ""
        if self.reached is not None:
            self.stood_ns = source.taken_ns
        self._source = self.wanted_seq = None
        source.close()  # its thread has ended
        return source.failure

    def step_as_wanted(self) -> None:
        """Once there is a state, by as many frames as it is away from the one that was asked for."""
        if self.wanted_seq is not None and self.point is not None and self.point.has_state and self._source is not None:
            self._source.step(self.wanted_seq - self.point.mirror.seq)
            self.wanted_seq = None

    def close(self, *, wait: bool = False) -> None:
        """Let go of the ring's recording; `wait` until its thread ended."""
        opening, self._opening = self._opening, None
        source, self._source = self._source, None
        self.point = self.wanted_ns = None
        self.wants_play, self.wanted_seq = False, None
        if opening is not None:
            opening.cancel()
            if wait:
                opening.wait(2.0)
        if source is not None and wait:
            source.close()
        elif source is not None:
            threading.Thread(target=source.close, name="kvscope-let-go", daemon=True).start()
