"""Chat turns as seen by other views: which turn computed a request, and a way to show that turn.

The console sets the lookup, so that views such as the inspector do not depend on the console.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal


@dataclass(frozen=True, slots=True)
class ChatTurn:
    conversation: str
    """Key of the conversation."""
    answer: str
    """Key of the answer within the conversation."""
    title: str
    number: int
    """Number of the turn, counted from 1 along the turns before it."""

    def __str__(self) -> str:
        return f"turn {self.number} of “{self.title}”"


class ChatTurns(QObject):
    show_requested = Signal(object)
    """Emitted with a `ChatTurn` that the console should show."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._find: Callable[[int, int], ChatTurn | None] = lambda epoch, number: None

    def set_lookup(self, find: Callable[[int, int], ChatTurn | None]) -> None:
        """Set the function that returns the turn of a request by the request's epoch and number."""
        self._find = find

    def find(self, epoch: int, number: int) -> ChatTurn | None:
        """Return the turn whose answer request `number` computed, or None if it belongs to no known chat."""
        return self._find(epoch, number) if number else None

    def show(self, epoch: int, number: int) -> None:
        turn = self.find(epoch, number)
        if turn is not None:
            self.show_requested.emit(turn)
