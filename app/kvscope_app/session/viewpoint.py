"""One place of a timeline: a source, the state rebuilt from it, and what happened there lately.

A session has one at the end, and one at the cursor once somebody left the end. Knows no Qt.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from kvscope_app.session.history import History
from kvscope_app.session.links import Player
from kvscope_app.session.past import fill_past
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.source import Source, Update
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.session_overview import SessionOverview


class Viewpoint:
    """Owns `mirror` and `history`. With a `player` a jump begins both anew, and the past comes from `overview`."""

    def __init__(
        self,
        source: Source,
        overview: SessionOverview,
        player: Player | None = None,
        resync: Callable[[], None] | None = None,
    ) -> None:
        self.source = source
        self.player = player
        self.mirror = Mirror()
        self.history = History()
        self.has_state = False
        """Whether anything was applied."""
        self.failure = ""
        """Why the newest update that did not fit did not, until a snapshot made it good."""
        self._overview = overview
        self._resync = resync

    def apply(self, update: Update) -> bool:
        """Take in `update`, the source's newest; False when it did not fit: a snapshot makes it good."""
        has_jumped = self.player is not None and self.player.has_jumped
        if has_jumped:
            self.mirror = Mirror()  # what ended after this time has not ended yet
        try:
            self.mirror.apply(update)
        except ProtocolError as error:
            self.failure = str(error)
            if self._resync is not None:
                self._resync()
            return False
        if update.snapshot is not None:
            self.failure = ""
        if self.player is None:
            self.history.add(update, self.mirror, time.monotonic_ns())
        elif has_jumped:
            self.history.begin(update, self.mirror, self.player.now_ns)
            self.fill_past()
        else:
            self.history.add(update, self.mirror, self.player.taken_ns)
        self.has_state = True
        return True

    def fill_past(self) -> None:
        """The overview grew: what was before the last jump is known better."""
        if self.player is not None:
            recording = self.player.recording
            fill_past(self.history, self._overview, recording.start_ns + round(recording.first_s * 1e9))
            self._fill_stops()

    def _fill_stops(self) -> None:
        """Of what was before a jump, delta checkpoints do not tell when the engine stood still: the overview does."""
        hello, now_ns = self.mirror.hello, self.mirror.time_ns
        if hello is None:
            return
        for stop in self._overview.stops.shifted(hello.time_ns - hello.wall_time_ns):
            if hello.time_ns <= stop.begin_ns < now_ns:
                self.mirror.stops.add(stop if stop.end_ns <= now_ns else replace(stop, end_ns=0))
