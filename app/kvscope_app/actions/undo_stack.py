"""What can be undone in a window, in the order it was done. Knows nothing of what that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject
from PySide6.QtGui import QUndoCommand, QUndoStack

_MAX_STEPS: Final = 100


class UndoStack(QUndoStack):
    """Of one window. Whoever did something tells how it is taken back:
    `window.undo.did("deleting the chat", undo, redo)`."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.setUndoLimit(_MAX_STEPS)
        self.is_at_work = False
        """Something is undone or done again now: what changes is not news."""

    def did(self, words: str, undo: Callable[[], object], redo: Callable[[], object]) -> None:
        """Something was done, said in `words` as after "Undo": "closing the memory dock"."""
        self.push(_Done(words, undo, redo, self))

    def forget(self) -> None:
        """The window closes: nothing is undone any more, and nobody is to be told."""
        self.blockSignals(True)
        self.clear()


class _Done(QUndoCommand):
    def __init__(self, words: str, undo: Callable[[], object], redo: Callable[[], object], stack: UndoStack) -> None:
        super().__init__(words)
        self._undo, self._redo, self._stack = undo, redo, stack
        self._is_new = True

    def undo(self) -> None:
        self._do(self._undo)

    def redo(self) -> None:
        """Qt calls it when it is pushed as well: it is done already then."""
        if self._is_new:
            self._is_new = False
            return
        self._do(self._redo)

    def _do(self, what: Callable[[], object]) -> None:
        self._stack.is_at_work = True
        try:
            what()
        finally:
            self._stack.is_at_work = False
