"""Restores the widths of docks (below the map: heights) when a window that was made smaller grows again.

Qt shrinks docks that do not fit into a smaller window, and gives the space of a larger window to the center only. Owns
the lengths that the user or a layout set; moving an edge by hand replaces them.
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
_WINDOW: Final = "window"
"""Key of the window's size. No dock has this name."""
_SIDES: Final = (Qt.DockWidgetArea.LeftDockWidgetArea, Qt.DockWidgetArea.RightDockWidgetArea)
_ACROSS, _DOWN = Qt.Orientation.Horizontal, Qt.Orientation.Vertical


class DockLengths(QObject):
    """Dock lengths of one window, recorded from the first `settled` of `undo` on."""

    edge_moved = Signal()
    """Emitted after the user moved the edge of a dock."""

    def __init__(self, window: WindowBody, undo: LayoutUndo) -> None:
        super().__init__(window)
        self._window = window
        self._lengths: dict[str, int] = {}
        self._window_size = QSize()
        """Window size at which all lengths were recorded."""
        self._pressed: dict[str, int] = {}
        self._later = QTimer(self, singleShot=True, interval=0)
        self._later.timeout.connect(self._restore)
        self._moved = QTimer(self, singleShot=True, interval=0)
        self._moved.timeout.connect(self._record_moved)
        undo.settled.connect(self._record)
        window.installEventFilter(self)

    def restore(self, settings: QSettings, group: str) -> None:
        """Load the saved lengths, because a window that was closed while it was small opens small."""
        kept = settings.value(lengths_name(group))
        if isinstance(kept, Mapping):
            size, known = kept.get(_WINDOW), {name: kept.get(name) for name in self._window.docks}
            self._window_size = size if isinstance(size, QSize) else QSize()
            self._lengths = {name: n for name, n in known.items() if isinstance(n, int) and 0 < n <= _MAX_LENGTH}

    def save(self, settings: QSettings, group: str) -> None:
        settings.setValue(lengths_name(group), {**self._lengths, _WINDOW: self._window_size})

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QResizeEvent):
            before, now = event.oldSize(), event.size()
            if now.width() > before.width() or now.height() > before.height():
                self._later.start()
        elif event.type() is QEvent.Type.MouseButtonPress:  # the window itself receives mouse events on dock edges
            self._pressed = self._now()
        elif event.type() is QEvent.Type.MouseButtonRelease:
            self._moved.start()
        return False

    def _restore(self) -> None:
        now, docks = self._now(), self._window.docks
        for orientation in (_ACROSS, _DOWN):
            along = [name for name in now if self._along(name) is orientation]
            short = [name for name in along if now[name] < self._lengths.get(name, 0)]
            lengths = [self._lengths[name] for name in short]
            self._window.resizeDocks([docks[name] for name in short], lengths, orientation)

    def _record(self, is_whole: bool) -> None:
        """Record the lengths after docks were moved: the whole layout, or some docks while others may be too short."""
        size, now = self._window.size(), self._now()
        is_smaller = size.width() < self._window_size.width() or size.height() < self._window_size.height()
        if is_whole or not is_smaller:
            self._lengths, self._window_size = self._lengths | now, size
        else:
            self._lengths |= {name: length for name, length in now.items() if length > self._lengths.get(name, 0)}

    def _record_moved(self) -> None:
        """Record the lengths that changed while the mouse button was pressed, because the user moved an edge."""
        moved = {name: length for name, length in self._now().items() if length != self._pressed.get(name)}
        self._lengths |= moved
        if moved:
            self.edge_moved.emit()

    def _now(self) -> dict[str, int]:
        """Return the lengths of docks at the sides and below the map, including those behind tabs."""
        window = self._window
        names = {dock: name for name, dock in window.docks.items()}
        found: dict[str, int] = {}
        for name, dock in window.docks.items():
            if not dock.isFloating() and not dock.visibleRegion().isEmpty():
                length = dock.width() if self._along(name) is _ACROSS else dock.height()
                found |= {names[each]: length for each in (dock, *window.tabifiedDockWidgets(dock)) if each in names}
        return found

    def _along(self, name: str) -> Qt.Orientation:
        return _ACROSS if self._window.dockWidgetArea(self._window.docks[name]) in _SIDES else _DOWN
