"""The cursor of a live session away from its end: what was kept on the disk, opened and played.

Owns the second mirror's viewpoint and where it was told to go meanwhile; nothing while the session is live. Knows no
Qt and nobody who looks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvscope_app.session.background import Background
from kvscope_app.session.links import Player
from kvscope_app.session.viewpoint import Viewpoint
from kvscope_telemetry.summaries.course import Course

if TYPE_CHECKING:
    from kvscope_app.session.kept.kept_timeline import KeptTimeline
    from kvscope_telemetry.playback.playback_source import PlaybackSource
    from kvscope_telemetry.timeline.tape import Tape


class Cursor:
    """Nowhere, until `go_to`; nowhere again after `close`."""

    def __init__(self, course: Course) -> None:
        self.point: Viewpoint | None = None
        self.wanted_ns: int | None = None
        """Where it was told to go while the tape opens, by the wall clock."""
        self.wants_play = False
        """Whether it is to go on from there."""
        self.wanted_seq: int | None = None
        """The frame to be at, told before the tape was open."""
        self._course = course
        self._opening: Background[Tape] | None = None
        self._source: PlaybackSource | None = None

    @property
    def player(self) -> Player | None:
        """Once it is open."""
        return self._source

    @property
    def is_opening(self) -> bool:
        """Whether the tape is being opened."""
        return self._opening is not None

    @property
    def is_seeking(self) -> bool:
        """Whether what there is to take is not yet of the position."""
        return self._source is not None and self._source.is_seeking

    def go_to(self, time_ns: int, kept: KeptTimeline, speed: float) -> None:
        """Be at `time_ns`, by the wall clock; later, where the tape has to be opened first."""
        self.wanted_seq = None
        if self._source is not None:
            self._source.seek((time_ns - self._source.recording.start_ns) / 1e9, with_past=False)
            return
        self.wanted_ns = time_ns
        if self._opening is None:
            self._opening = kept.open_tape()

    def take_opened(self, speed: float) -> str:
        """Look whether the tape is open, and go where it was told to; why it cannot be opened, else empty."""
        opening = self._opening
        if opening is None or not opening.is_over:
            return ""
        self._opening = None
        tape, time_ns = opening.made, self.wanted_ns
        self.wanted_ns = None
        if tape is None or time_ns is None:
            self.wants_play, self.wanted_seq = False, None
            return opening.failure
        from kvscope_telemetry.playback.playback_source import PlaybackSource  # who stays live needs none of it

        source = PlaybackSource(tape, is_playing=False)
        source.seek((time_ns - tape.start_ns) / 1e9, with_past=False)
        source.set_speed(speed)
        self._source = source
        self.point = Viewpoint(source, self._course, source)
        if self.wants_play:
            source.play()
        self.wants_play = False
        return ""

    def step_as_wanted(self) -> None:
        """Once there is a state, by as many frames as it is away from the one that was asked for."""
        if self.wanted_seq is not None and self.point is not None and self.point.has_state and self._source is not None:
            self._source.step(self.wanted_seq - self.point.mirror.seq)
            self.wanted_seq = None

    def close(self, *, wait: bool = False) -> None:
        """Let go of the tape; `wait` until its thread ended."""
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
