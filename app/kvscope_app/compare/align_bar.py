"""Combo box that chooses how the runs of a comparison are aligned in time. Owns the list of choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QComboBox

from kvscope_app.compare.session_pair import SessionPair
from kvscope_app.session.mark_labels import name_of
from kvscope_app.session.session import Session
from kvscope_telemetry.exports.comparison.alignment import AlignedMoment, Alignment, named_moments, shared_moments

STARTS: Final = "Starts together"
CLOCK: Final = "By the clock"
CHOSEN: Final = "Chosen moments"

_Choice = tuple[Alignment, int | None]
"""(alignment, time on A's clock in ns to move to, or None to stay)."""


class AlignBox(QComboBox):
    """Combo box of alignments: at the starts, by wall-clock time if the runs overlap, or at a moment that both runs
    have.

    Such a moment is for example the first preemption of each run, or a bookmark of the same name in both.
    """

    chosen = Signal(object, object)
    """Emitted when the user selects an entry, with its `Alignment` and the time on A's clock in ns to move to.

    The time is None if the cursor should stay.
    """

    def __init__(self, pair: SessionPair) -> None:
        super().__init__()
        self._pair = pair
        self.alignments: dict[str, _Choice | None] = {}
        self.setAccessibleName("Align by")
        self.setToolTip("How the two runs are aligned in time")
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToContents)
        self.refresh()
        self.textActivated.connect(self._on_activated)

    def refresh(self) -> None:
        choices = self._current_choices()
        if list(choices) != list(self.alignments):
            current = self.currentText() or STARTS
            self.clear()
            self.addItems(list(choices))
            self.setCurrentText(current if current in choices else CHOSEN)
        self.alignments = choices

    def show_chosen(self) -> None:
        self.setCurrentText(CHOSEN)

    def _current_choices(self) -> dict[str, _Choice | None]:
        pair = self._pair
        choices: dict[str, _Choice | None] = {STARTS: (pair.by_starts(), None)}
        if pair.has_time_overlap:
            choices[CLOCK] = (Alignment(), None)
        run_moments = [named_moments(session.overview, _bookmark_moments(session)) for session in (pair.a, pair.b)]
        for moment, alignment in shared_moments(*run_moments):
            choices[moment.name[:1].upper() + moment.name[1:]] = (alignment, moment.time_ns)
        choices[CHOSEN] = None
        return choices

    def _on_activated(self, name: str) -> None:
        choice = self.alignments.get(name)
        self.chosen.emit(*((self._pair.alignment, None) if choice is None else choice))


def _bookmark_moments(session: Session) -> Iterable[AlignedMoment]:
    return [AlignedMoment(name_of(mark), mark.time_ns) for mark in session.bookmarks.shown]
