"""Offers once to open the histories of crashed sessions, in the banner of the first window that shows something."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.background import Background
from kvscope_app.session.recording.rings import find_left_rings
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.number_text import num_bytes, plural, seconds
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.model_names import short_name

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.orphaned_rings import OrphanedRing, RemovedRings
    from kvscope_telemetry.recordings.reader import Recording

_POLL_MS: Final = 500
_BEGIN_MS: Final = 1500
"""Delay after the start, so that the search does not slow it down."""


class CrashedHistories(QObject):
    """Searches on a thread and makes a single offer."""

    def __init__(
        self,
        parent: QObject,
        windows: Callable[[], Sequence[SessionWindow]],
        open_recording: Callable[[Recording], object],
    ) -> None:
        super().__init__(parent)
        self._windows, self._show = windows, open_recording
        self._finding: Background[RemovedRings] | None = None
        self._opening: Background[Recording] | None = None
        self._window: SessionWindow | None = None
        self._clock = QTimer(self, interval=_POLL_MS)
        self._clock.timeout.connect(self._poll)
        self._is_over = False
        QTimer.singleShot(_BEGIN_MS, self, self.start)

    def stop(self) -> None:
        """Cancel the offer, because the windows are closed."""
        self._is_over = True
        self._clock.stop()

    def start(self) -> None:
        if self._finding is None and not self._is_over:
            self._finding = find_left_rings()
            self._clock.start()

    def _poll(self) -> None:
        if self._opening is not None:
            self._on_opened(self._opening)
        elif self._finding is not None and self._finding.is_finished:
            found = self._finding.result
            if found is None or not (found.kept or found.discarded):
                self._clock.stop()
            else:
                self._offer(found)

    def _offer(self, tidied: RemovedRings) -> None:
        """Show the offer once a window shows something and its banner is free.

        An offer made earlier would disappear with the banner about the engine's start.
        """
        window = next((w for w in self._windows() if w.session.live_mirror.hello is not None), None)
        if window is None or window.banner.isVisible():
            return
        self._clock.stop()
        self._window = window
        if not tidied.kept:
            window.banner.show_message(
                "Old session histories deleted", _deleted(tidied.discarded), is_offer=True, is_temporary=True
            )
            return
        rings = tidied.kept
        ring, more = rings[0], len(rings) - 1
        discard = "Delete all" if more else "Delete"
        window.banner.show_message(
            f"{plural(len(rings), 'session')} ended unexpectedly" if more else "A session ended unexpectedly",
            _text(ring, "The newest" if more else "Recovered session")
            + (f". {_deleted(tidied.discarded)}" if tidied.discarded else ""),
            (
                ("Open the newest" if more else "Open", lambda: self.open_ring(ring)),
                (discard, lambda: self.discard_rings(rings)),
            ),
            is_offer=True,
        )

    def open_ring(self, ring: OrphanedRing) -> None:
        from kvscope_telemetry.recordings.reader import Recording

        self._hide()
        self._opening = Background(lambda watch: Recording.open(ring.folder, watch), "kvscope-open")
        self._clock.start()

    def _on_opened(self, opening: Background[Recording]) -> None:
        if not opening.is_finished:
            return
        self._clock.stop()
        self._opening = None
        if opening.result is not None:
            self._show(opening.result)
        elif self._window in self._windows() and self._window is not None:
            self._window.banner.show_message("The recovered session cannot be opened", opening.failure)

    def discard_rings(self, rings: list[OrphanedRing]) -> None:
        self._hide()

        def discard(_: object) -> None:
            for ring in rings:
                try:
                    ring.discard()
                except BadInput:  # in use by another process
                    continue

        Background(discard, "kvscope-discard")

    def _hide(self) -> None:
        if self._window is not None:
            self._window.banner.hide()


def _text(ring: OrphanedRing, what: str) -> str:
    """Describe a history, the most important part first, because a small window truncates the text."""
    when = time.strftime("%a %H:%M", time.localtime(ring.start_ns / 1e9))
    return f"{what}: {seconds(round(ring.seconds))} from {when}, {short_name(ring.model)}, {num_bytes(ring.num_bytes)}"


def _deleted(rings: Sequence[OrphanedRing]) -> str:
    from kvscope_telemetry.recordings.orphaned_rings import MAX_LEFT_BYTES, MAX_LEFT_S

    return (
        f"{plural(len(rings), 'crashed session')} deleted "
        f"({num_bytes(sum(ring.num_bytes for ring in rings))}): older than {MAX_LEFT_S / 86400:.0f} days, "
        f"or over {num_bytes(MAX_LEFT_BYTES)} in total"
    )
