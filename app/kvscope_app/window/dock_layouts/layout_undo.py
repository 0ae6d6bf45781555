"""Detects changes of the dock arrangement and makes them undoable. Stores arrangements in Qt's packed format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from PySide6.QtCore import QByteArray, QObject, QTimer, Signal
from shiboken6 import isValid

from kvscope_app.setting_names import LAYOUT_VERSION
from kvscope_app.window.window_body import WindowBody

_DEBOUNCE_MS: Final = 250
"""Delay in ms from the last movement of a dock to recording the change. Moving one dock moves others a little later."""


class LayoutUndo(QObject):
    """Undo of layout changes in one window. It watches the docks after the first `record_state`."""

    settled = Signal(bool)
    """Emitted when the docks have stopped moving, with whether the whole layout was replaced."""

    def __init__(self, window: WindowBody) -> None:
        super().__init__(window)
        self._window = window
        self._recorded_state: QByteArray | None = None
        self._recorded_dock_states: dict[str, tuple[bool, bool]] = {}
        self._announced_text = ""
        self._undo_views: Callable[[], object] | None = None
        self._redo_views: Callable[[], object] | None = None
        self._moved_dock = ""
        self._debounce_timer = QTimer(self, singleShot=True, interval=_DEBOUNCE_MS)
        self._debounce_timer.timeout.connect(self._record_change)
        for name, dock in window.docks.items():
            for signal in (dock.toggleViewAction().toggled, dock.topLevelChanged, dock.dockLocationChanged):
                signal.connect(partial(self._on_change, name))

    def record_state(self, *, is_replaced: bool = False) -> None:
        """Record the present arrangement as the state that the next undo restores.

        `is_replaced`: whether the whole layout was replaced.
        """
        self._recorded_state, self._recorded_dock_states = self._window.saveState(LAYOUT_VERSION), self._dock_states()
        self.settled.emit(is_replaced)

    def accept_change(self) -> None:
        """Record a change made by the window rather than the user, so that Undo does not revert it."""
        if self._recorded_state is not None:
            self.record_state()

    def announce_replacement(
        self,
        text: str,
        undo_views: Callable[[], object] | None = None,
        redo_views: Callable[[], object] | None = None,
    ) -> None:
        """Announce that the whole layout will be replaced.

        `text` describes the change for Undo. If the views change as well, `undo_views` and `redo_views` undo and redo
        their changes.
        """
        if self._recorded_state is not None and not self._window.undo.is_applying:
            self._recorded_state = self._window.saveState(LAYOUT_VERSION)  # with the current sizes
            self._announced_text = text
            self._undo_views, self._redo_views = undo_views, redo_views
            self._debounce_timer.start()

    def _on_change(self, name: str, *_: object) -> None:
        if not isValid(self._window):  # being deleted: its docks emit signals meanwhile
            return
        if self._recorded_state is not None and not self._window.undo.is_applying and self._window.isVisible():
            self._moved_dock = name
            self._debounce_timer.start()

    def _record_change(self) -> None:
        before, text = self._recorded_state, self._announced_text or self._describe_change()
        self.record_state(is_replaced=bool(self._announced_text))
        undo_views, redo_views = self._undo_views, self._redo_views
        self._undo_views = self._redo_views = None
        self._announced_text = ""
        after = self._recorded_state
        if before is not None and after is not None and (after != before or undo_views is not None):
            undo, redo = partial(self._restore, before, undo_views), partial(self._restore, after, redo_views)
            self._window.undo.push_done(text, undo, redo)

    def _describe_change(self) -> str:
        """Return the description of the change that the Undo action shows.

        A dock that was opened, closed, floated or docked takes precedence over moved docks.
        """
        for name, (hidden, floats) in self._dock_states().items():
            title = self._window.docks[name].windowTitle().lower()
            was_hidden, was_floating = self._recorded_dock_states.get(name, (hidden, floats))
            if hidden != was_hidden:
                return f"{'closing' if hidden else 'opening'} {title}"
            if floats != was_floating:
                return f"{'floating' if floats else 'docking'} {title}"
        return f"moving {self._window.docks[self._moved_dock].windowTitle().lower()}"

    def _dock_states(self) -> dict[str, tuple[bool, bool]]:
        """Return (is closed, is floating) of each dock by name."""
        return {name: (dock.isHidden(), dock.isFloating()) for name, dock in self._window.docks.items()}

    def _restore(self, state: QByteArray, restore_views: Callable[[], object] | None) -> None:
        self._window.restoreState(state, LAYOUT_VERSION)
        if restore_views is not None:
            restore_views()
        self.record_state(is_replaced=True)
