"""Offers once to open the histories of crashed sessions, in the banner of the first window that shows data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.session.recording.rings import find_orphaned_rings
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.number_text import num_bytes, plural, seconds
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.model_names import short_name

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.orphaned_rings import OrphanedRing, RemovedRings
    from kvscope_telemetry.recordings.reader import Recording

_OFFER_INTERVAL_MS: Final = 500
"""Interval of attempts to show the offer, until a window can."""
_START_DELAY_MS: Final = 1500
"""Delay from the program's start to the search for histories, which would slow down the start."""


class CrashedHistories(QObject):
    def __init__(
        self,
        parent: QObject,
        windows: Callable[[], Sequence[SessionWindow]],
        open_recording: Callable[[Recording], object],
    ) -> None:
        super().__init__(parent)
        self._windows, self._open_recording = windows, open_recording
        self._search: BackgroundWatch | None = None
        self._window: SessionWindow | None = None
        self._offer_timer = QTimer(self, interval=_OFFER_INTERVAL_MS)
        self._is_stopped = False
        QTimer.singleShot(_START_DELAY_MS, self, self.start)

    def stop(self) -> None:
        """Stop offering histories, because the windows are closed."""
        self._is_stopped = True
        self._offer_timer.stop()

    def start(self) -> None:
        if self._search is None and not self._is_stopped:
            search = find_orphaned_rings()
            self._search = BackgroundWatch(search, partial(self._on_found, search), self)

    def _on_found(self, search: Background[RemovedRings]) -> None:
        removed = search.result
        if removed is not None and (removed.kept or removed.discarded) and not self._is_stopped:
            self._offer_timer.timeout.connect(partial(self._offer, removed))
            self._offer_timer.start()
            self._offer(removed)

    def _offer(self, removed: RemovedRings) -> None:
        """Show the offer in a window that shows data and whose banner is free.

        Before a window shows data, its banner is used to report the engine's start, which would replace the offer.
        """
        window = next((w for w in self._windows() if w.session.live_mirror.hello is not None), None)
        if window is None or window.banner.isVisible():
            return
        self._offer_timer.stop()
        self._window = window
        if not removed.kept:
            window.banner.show_message(
                "Old session histories deleted", _deletion_text(removed.discarded), is_offer=True, is_temporary=True
            )
            return
        rings = removed.kept
        ring, num_others = rings[0], len(rings) - 1
        discard = "Delete all" if num_others else "Delete"
        window.banner.show_message(
            f"{plural(len(rings), 'session')} ended unexpectedly" if num_others else "A session ended unexpectedly",
            _ring_text(ring, "The newest" if num_others else "Recovered session")
            + (f". {_deletion_text(removed.discarded)}" if removed.discarded else ""),
            (
                ("Open the newest" if num_others else "Open", lambda: self.open_ring(ring)),
                (discard, lambda: self.discard_rings(rings)),
            ),
            is_offer=True,
        )

    def open_ring(self, ring: OrphanedRing) -> None:
        from kvscope_telemetry.recordings.reader import Recording

        self._hide()
        opening = Background(lambda watch: Recording.open(ring.folder, watch), "kvscope-open")
        BackgroundWatch(opening, partial(self._on_opened, opening), self)

    def _on_opened(self, opening: Background[Recording]) -> None:
        if self._is_stopped:
            return
        if opening.result is not None:
            self._open_recording(opening.result)
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


def _ring_text(ring: OrphanedRing, title: str) -> str:
    """Describe a history. The most important part comes first, because a small window cuts off the text."""
    when = time.strftime("%a %H:%M", time.localtime(ring.start_ns / 1e9))
    return f"{title}: {seconds(round(ring.seconds))} from {when}, {short_name(ring.model)}, {num_bytes(ring.num_bytes)}"


def _deletion_text(rings: Sequence[OrphanedRing]) -> str:
    from kvscope_telemetry.recordings.orphaned_rings import MAX_ORPHANED_BYTES, MAX_ORPHANED_S

    return (
        f"{plural(len(rings), 'crashed session')} deleted "
        f"({num_bytes(sum(ring.num_bytes for ring in rings))}): older than {MAX_ORPHANED_S / 86400:.0f} days, "
        f"or over {num_bytes(MAX_ORPHANED_BYTES)} in total"
    )
