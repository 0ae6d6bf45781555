"""Restores the sizes of a window and its docks when text is enlarged and reduced again.

Qt enlarges docks and windows for larger text but never reduces them. The sizes before the zoom are restored as far as
possible, until the user moves an edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow

from kvscope_app.ui.theming.theme_manager import ThemeManager

_RETRY_MS: Final = 50
"""Milliseconds between size checks. Views are laid out again in later turns of the event loop."""
_NUM_RETRIES: Final = 6
"""Number of size checks after a zoom change. Several are needed because views are laid out late on a busy machine."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    window: QSize
    docks: dict[str, QSize] = field(default_factory=dict)


class ZoomedSizes(QObject):
    def __init__(self, window: QMainWindow, docks: Mapping[str, QDockWidget], themes: ThemeManager) -> None:
        super().__init__(window)
        self._window, self._docks, self._themes = window, docks, themes
        self._target_sizes: _Sizes | None = None
        self._restored_sizes: _Sizes | None = None
        """Actual sizes of the window and its docks after the last restoration; None between a zoom change and its first
        restoration.
        """
        self._was_edge_moved = False
        """Whether the user moved an edge since the last zoom change."""
        self._is_resizing = False
        self._retries_left = 0
        self._retry_timer = QTimer(self, singleShot=True, interval=_RETRY_MS)
        self._retry_timer.timeout.connect(self._retry)
        themes.zooming.connect(self._on_zoom)
        window.installEventFilter(self)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QResizeEvent):
            self._was_edge_moved |= not self._is_resizing and not self._is_forced(event.oldSize(), event.size())
        return False

    def on_edge_moved(self) -> None:
        """Stop restoring earlier sizes, because the user moved the edge of a dock."""
        self._was_edge_moved = True

    def _is_forced(self, before: QSize, size: QSize) -> bool:
        """Whether the window grew from `before` to `size` only to reach the minimum size of its contents."""
        min_size = self._window.minimumSize()
        width_is_forced = size.width() in (before.width(), min_size.width())
        return width_is_forced and size.height() in (before.height(), min_size.height())

    def _on_zoom(self) -> None:
        if not self._window.isVisible():
            return
        current = self._current_sizes()
        is_settled = not self._retry_timer.isActive()
        if self._target_sizes is None or self._was_edge_moved or (is_settled and current != self._restored_sizes):
            self._target_sizes = current
        self._was_edge_moved, self._restored_sizes = False, None
        self._retries_left = _NUM_RETRIES
        self._retry_timer.start()

    def _retry(self) -> None:
        self._themes.finish()  # hidden widgets need space, too
        target = self._target_sizes
        if target is None or self._was_edge_moved or not self._window.isVisible():
            return
        self._retries_left -= 1
        if self._current_sizes() != self._restored_sizes:
            self._restore(target)
        if self._retries_left:
            self._retry_timer.start()

    def _restore(self, target: _Sizes) -> None:
        window = self._window
        self._is_resizing = True
        try:
            if not window.isMaximized() and not window.isFullScreen():
                window.resize(target.window)
            docks = ((self._docks[name], size) for name, size in target.docks.items())
            docked = {dock: size for dock, size in docks if not dock.isFloating()}
            window.resizeDocks(list(docked), [size.width() for size in docked.values()], Qt.Orientation.Horizontal)
            window.resizeDocks(list(docked), [size.height() for size in docked.values()], Qt.Orientation.Vertical)
            self._restored_sizes = self._current_sizes()
        finally:
            self._is_resizing = False

    def _current_sizes(self) -> _Sizes:
        layout = self._window.layout()
        if layout is not None:
            layout.activate()
        visible_sizes = {name: dock.size() for name, dock in self._docks.items() if not dock.visibleRegion().isEmpty()}
        return _Sizes(self._window.size(), visible_sizes)
