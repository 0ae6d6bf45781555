"""Restores the sizes of docks when a window that was made smaller grows again: widths, or heights of docks below the
page map.

Qt shrinks docks that do not fit into a smaller window, and gives the space of a larger window to the center only. Owns
the lengths that the user or a layout set. When the user moves an edge, the new lengths replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from PySide6.QtCore import QEvent, QObject, QSettings, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent

from kvscope_app.setting_names import lengths_name
from kvscope_app.window.dock_layouts.layout_undo import LayoutUndo
from kvscope_app.window.window_body import WindowBody

_MAX_LENGTH: Final = 100_000
_WINDOW_KEY: Final = "window"
"""Key under which the window's size is saved with the lengths. No dock has this name."""
_SIDES: Final = (Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea)
_HORIZONTAL, _VERTICAL = Qt.Orientation.Horizontal, Qt.Orientation.Vertical


class DockLengths(QObject):
    """Dock lengths of one window. They are recorded after `undo` has emitted `settled` for the first time."""

    edge_moved = Signal()

    def __init__(self, window: WindowBody, undo: LayoutUndo) -> None:
        super().__init__(window)
        self._window = window
        self._lengths: dict[str, int] = {}
        self._window_size = QSize()
        """Window size at which the lengths of all visible docks were last recorded."""
        self._lengths_on_press: dict[str, int] = {}
        self._restore_timer = QTimer(self, singleShot=True, interval=0)
        self._restore_timer.timeout.connect(self._restore)
        self._edge_timer = QTimer(self, singleShot=True, interval=0)
        self._edge_timer.timeout.connect(self._record_moved_edges)
        undo.settled.connect(self._record)
        window.installEventFilter(self)

    def restore(self, settings: QSettings, group: str) -> None:
        """Load the saved lengths. A window that was closed while it was small opens small, and needs these
        lengths when it grows.
        """
        saved = settings.value(lengths_name(group))
        if isinstance(saved, Mapping):
            size, lengths = saved.get(_WINDOW_KEY), {name: saved.get(name) for name in self._window.docks}
            self._window_size = size if isinstance(size, QSize) else QSize()
            self._lengths = {name: n for name, n in lengths.items() if isinstance(n, int) and 0 < n <= _MAX_LENGTH}

    def save(self, settings: QSettings, group: str) -> None:
        settings.setValue(lengths_name(group), {**self._lengths, _WINDOW_KEY: self._window_size})

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QResizeEvent):
            old_size, size = event.oldSize(), event.size()
            if size.width() > old_size.width() or size.height() > old_size.height():
                self._restore_timer.start()
        elif event.type() is QEvent.Type.MouseButtonPress:  # the window itself receives mouse events on dock edges
            self._lengths_on_press = self._current_lengths()
        elif event.type() is QEvent.Type.MouseButtonRelease:
            self._edge_timer.start()
        return False

    def _restore(self) -> None:
        current, docks = self._current_lengths(), self._window.docks
        for orientation in (_HORIZONTAL, _VERTICAL):
            names = [name for name in current if self._orientation_of(name) is orientation]
            too_short = [name for name in names if current[name] < self._lengths.get(name, 0)]
            lengths = [self._lengths[name] for name in too_short]
            self._window.resizeDocks([docks[name] for name in too_short], lengths, orientation)

    def _record(self, is_replaced: bool) -> None:
        """Record the lengths after docks were moved.

        `is_replaced`: whether the whole layout was replaced. Otherwise, a window that is smaller than at the last
        complete recording may have squeezed docks, so only lengths that grew are recorded.
        """
        size, current = self._window.size(), self._current_lengths()
        is_smaller = size.width() < self._window_size.width() or size.height() < self._window_size.height()
        if is_replaced or not is_smaller:
            self._lengths, self._window_size = self._lengths | current, size
        else:
            self._lengths |= {name: length for name, length in current.items() if length > self._lengths.get(name, 0)}

    def _record_moved_edges(self) -> None:
        """Record the lengths that changed while the mouse button was pressed, because the user moved an edge."""
        moved = {
            name: length
            for name, length in self._current_lengths().items()
            if length != self._lengths_on_press.get(name)
        }
        self._lengths |= moved
        if moved:
            self.edge_moved.emit()

    def _current_lengths(self) -> dict[str, int]:
        """Return the lengths in pixels of the docks that are visible, or are tabs behind visible ones."""
        window = self._window
        names = {dock: name for name, dock in window.docks.items()}
        lengths: dict[str, int] = {}
        for name, dock in window.docks.items():
            if not dock.isFloating() and not dock.visibleRegion().isEmpty():
                length = dock.width() if self._orientation_of(name) is _HORIZONTAL else dock.height()
                lengths |= {names[each]: length for each in (dock, *window.tabifiedDockWidgets(dock)) if each in names}
        return lengths

    def _orientation_of(self, name: str) -> Qt.Orientation:
        return _HORIZONTAL if self._window.dockWidgetArea(self._window.docks[name]) in _SIDES else _VERTICAL
