"""Combo box to choose how two timelines are aligned in time. Owns the list of choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QComboBox

from kvscope_app.compare.session_pair import SessionPair
from kvscope_app.session.mark_labels import name_of
from kvscope_app.session.session import Session
from kvscope_telemetry.exports.comparison.alignment import AlignedMoment, Alignment, moments, shared

STARTS: Final = "Starts together"
CLOCK: Final = "By the clock"
CHOSEN: Final = "Chosen moments"

_Way = tuple[Alignment, int | None]


class AlignBox(QComboBox):
    """Offers to align by the starts, by the clock if the runs overlap, and by moments that both have.

    Such a moment is for example the first preemption of each run.
    """

    chosen = Signal(object, object)
    """Emitted with the `Alignment` and the time of A to move to, or None to stay."""

    def __init__(self, pair: SessionPair) -> None:
        super().__init__()
        self._pair = pair
        self.alignments: dict[str, _Way | None] = {}
        self.setAccessibleName("Align by")
        self.setToolTip("How the two runs are aligned in time")
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
        self.refresh()
        self.textActivated.connect(self._on_activated)

    def refresh(self) -> None:
        """Update the list, because the overviews may have grown."""
        ways = self._available()
        if list(ways) != list(self.alignments):
            current = self.currentText() or STARTS
            self.clear()
            self.addItems(list(ways))
            self.setCurrentText(current if current in ways else CHOSEN)
        self.alignments = ways

    def show_chosen(self) -> None:
        """Show that the user aligned the timelines manually."""
        self.setCurrentText(CHOSEN)

    def _available(self) -> dict[str, _Way | None]:
        pair = self._pair
        ways: dict[str, _Way | None] = {STARTS: (pair.by_starts(), None)}
        if pair.have_one_clock:
            ways[CLOCK] = (Alignment(), None)
        named = [moments(session.overview, _named_moments(session)) for session in (pair.a, pair.b)]
        for moment, alignment in shared(*named):
            ways[moment.name[:1].upper() + moment.name[1:]] = (alignment, moment.time_ns)
        ways[CHOSEN] = None
        return ways

    def _on_activated(self, name: str) -> None:
        way = self.alignments.get(name)
        self.chosen.emit(*((self._pair.alignment, None) if way is None else way))


def _named_moments(session: Session) -> Iterable[AlignedMoment]:
    """Return the bookmarks of a session as moments."""
    return [AlignedMoment(name_of(mark), mark.time_ns) for mark in session.bookmarks.shown]
