"""Undo stack of a window. Knows nothing of the changes themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject
from PySide6.QtGui import QUndoCommand, QUndoStack

_MAX_STEPS: Final = 100


class UndoStack(QUndoStack):
    """Undo stack of one window, to which completed changes are pushed with `push_done`."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.setUndoLimit(_MAX_STEPS)
        self.is_at_work = False
        """Whether a change is being undone or redone, so that resulting changes must not be pushed."""

    def push_done(self, text: str, undo: Callable[[], object], redo: Callable[[], object]) -> None:
        """Push a completed change. `text` is the text after "Undo", such as "closing the memory dock"."""
        self.push(_DoneChange(text, undo, redo, self))

    def forget(self) -> None:
        """Clear the stack without signals, because the window closes."""
        self.blockSignals(True)
        self.clear()


class _DoneChange(QUndoCommand):
    def __init__(self, text: str, undo: Callable[[], object], redo: Callable[[], object], stack: UndoStack) -> None:
        super().__init__(text)
        self._undo, self._redo, self._stack = undo, redo, stack
        self._is_new = True

    def undo(self) -> None:
        self._run(self._undo)

    def redo(self) -> None:
        """Redo the change. Does nothing when Qt calls it on push, because the change is already done then."""
        if self._is_new:
            self._is_new = False
            return
        self._run(self._redo)

    def _run(self, change: Callable[[], object]) -> None:
        self._stack.is_at_work = True
        try:
            change()
        finally:
            self._stack.is_at_work = False
