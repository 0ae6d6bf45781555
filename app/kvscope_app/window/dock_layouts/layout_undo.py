"""Detects changes of the dock arrangement and makes them undoable. Knows Qt's packed layouts, not their contents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtCore import QByteArray, QObject, QTimer, Signal
from shiboken6 import isValid

from kvscope_app.setting_names import LAYOUT_VERSION
from kvscope_app.window.window_body import WindowBody

_DEBOUNCE_MS: Final = 250
"""Moving one dock moves others, and sizes follow in later turns of the event loop."""


class LayoutUndo(QObject):
    """Watches one window, from when all its views are loaded."""

    settled = Signal(bool)
    """Emitted when the docks have stopped moving. The argument is whether the whole layout was replaced."""

    def __init__(self, window: WindowBody) -> None:
        super().__init__(window)
        self._window = window
        self._recorded_state: QByteArray | None = None
        self._stood: dict[str, tuple[bool, bool]] = {}
        self._text = ""
        self._choices: tuple[Callable[[], object], Callable[[], object]] | None = None
        self._moved = ""
        self._clock = QTimer(self, singleShot=True, interval=_DEBOUNCE_MS)
        self._clock.timeout.connect(self._record_change)
        for name, dock in window.docks.items():
            for signal in (dock.toggleViewAction().toggled, dock.topLevelChanged, dock.dockLocationChanged):
                signal.connect(partial(self._on_change, name))

    def record_state(self, *, is_whole: bool = False) -> None:
        """Take the present arrangement as the state that the next undo restores.

        `is_whole`: whether the layout was replaced.
        """
        self._recorded_state, self._stood = self._window.saveState(LAYOUT_VERSION), self._dock_states()
        self.settled.emit(is_whole)

    def accept_change(self) -> None:
        """Accept a change that the window made itself, so that it cannot be undone by the user."""
        if self._recorded_state is not None:
            self.record_state()

    def before_change(
        self, text: str, choices: tuple[Callable[[], object], Callable[[], object]] | None = None
    ) -> None:
        """Announce that the whole layout will be replaced.

        `choices` has functions that undo and redo accompanying changes.
        """
        if self._recorded_state is not None and not self._window.undo.is_applying:
            self._recorded_state = self._window.saveState(LAYOUT_VERSION)  # with the current sizes
            self._text, self._choices = text, choices
            self._clock.start()

    def _on_change(self, name: str, *_: object) -> None:
        if not isValid(self._window):  # being deleted: its docks emit signals meanwhile
            return
        if self._recorded_state is not None and not self._window.undo.is_applying and self._window.isVisible():
            self._moved = name
            self._clock.start()

    def _record_change(self) -> None:
        before, text = self._recorded_state, self._text or self._what_changed()
        self.record_state(is_whole=bool(self._text))
        choices, self._choices = self._choices, None
        self._text = ""
        now = self._recorded_state
        if before is not None and now is not None and (now != before or choices is not None):
            undo, redo = choices or (None, None)
            self._window.undo.push_done(text, partial(self._restore, before, undo), partial(self._restore, now, redo))

    def _what_changed(self) -> str:
        """Describe the change for undo.

        A dock that was opened, closed, floated or docked takes precedence over moved docks.
        """
        for name, (hidden, floats) in self._dock_states().items():
            title = self._window.docks[name].windowTitle().lower()
            was_hidden, floated = self._stood.get(name, (hidden, floats))
            if hidden != was_hidden:
                return f"{'closing' if hidden else 'opening'} {title}"
            if floats != floated:
                return f"{'floating' if floats else 'docking'} {title}"
        return f"moving {self._window.docks[self._moved].windowTitle().lower()}"

    def _dock_states(self) -> dict[str, tuple[bool, bool]]:
        """Return (is closed, is floating) of each dock."""
        return {name: (dock.isHidden(), dock.isFloating()) for name, dock in self._window.docks.items()}

    def _restore(self, state: QByteArray, choices: Callable[[], object] | None = None) -> None:
        self._window.restoreState(state, LAYOUT_VERSION)
        if choices is not None:
            choices()
        self.record_state(is_whole=True)
