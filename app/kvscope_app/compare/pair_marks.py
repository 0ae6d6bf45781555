"""The bookmarks and alarms of both runs on one timeline, by A's clock, each named by its letter. Owns none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from msgspec.structs import replace
from PySide6.QtCore import QObject, Signal

from kvscope_app.playback.mark_labels import name_of
from kvscope_app.session.session import Session
from kvscope_telemetry.exports.comparison.alignment import AlignedMoment
from kvscope_telemetry.summaries.bookmark import Bookmark


class Sides(Protocol):
    """A `Pair`, as far as this asks it."""

    a: Session
    b: Session
    aligned: Any

    @property
    def sides(self) -> tuple[Any, Any]: ...


class PairMarks(QObject):
    """To be seen alone: who changes them does so in a window of their own."""

    changed = Signal()

    def __init__(self, pair: Sides, parent: QObject) -> None:
        super().__init__(parent)
        self._pair = pair
        for session in (pair.a, pair.b):
            session.bookmarks.changed.connect(self.changed)
        pair.aligned.connect(self.changed)

    @property
    def shown(self) -> list[Bookmark]:
        """In the order of time."""
        found = [
            replace(
                mark,
                time_ns=mark.time_ns - side.offset_ns,
                until_ns=mark.until_ns and mark.until_ns - side.offset_ns,
                text=f"{letter}: {mark.text}" if mark.text else letter,
            )
            for letter, side in zip("AB", self._pair.sides, strict=True)
            for mark in side.session.bookmarks.shown
        ]
        return sorted(found, key=lambda mark: mark.time_ns)


class NoLoop(QObject):
    """Two timelines have none yet."""

    changed = Signal()
    begin_ns: int | None = None
    end_ns: int | None = None


def named_moments(session: Session) -> Iterable[AlignedMoment]:
    """The bookmarks of a session, as moments to align by."""
    return [AlignedMoment(name_of(mark), mark.time_ns) for mark in session.bookmarks.shown]
