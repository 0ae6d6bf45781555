"""Undo stack of a window. Each change is a pair of functions: undo and redo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject
from PySide6.QtGui import QUndoCommand, QUndoStack

_MAX_STEPS: Final = 100


class UndoStack(QUndoStack):
    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.setUndoLimit(_MAX_STEPS)
        self.is_applying = False
        """Whether a change is being undone or redone. Callers must not push the changes that this causes to the
        stack.
        """

    def push_done(self, text: str, undo: Callable[[], object], redo: Callable[[], object]) -> None:
        """Push a change that was already made. `text` completes "Undo …", such as "closing the memory dock"."""
        self.push(_DoneChange(text, undo, redo, self))

    def forget(self) -> None:
        """Clear the stack without emitting signals. Called when the window closes."""
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
        """Redo the change, except on the first call: Qt calls `redo` on push, when the change was already made."""
        if self._is_new:
            self._is_new = False
            return
        self._run(self._redo)

    def _run(self, change: Callable[[], object]) -> None:
        self._stack.is_applying = True
        try:
            change()
        finally:
            self._stack.is_applying = False
