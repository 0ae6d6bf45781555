"""Keeps the sizes of a window and its docks while text is made larger and smaller again.

Larger text needs more room, and Qt makes a dock or the window larger for it, never smaller again. So they get back what
they had before, as far as there is room, until somebody moves an edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from PySide6.QtCore import QObject, QSize, Qt, QTimer
from PySide6.QtWidgets import QDockWidget, QMainWindow

from kvscope_app.look.theming.theme_keeper import ThemeKeeper

_SETTLE_MS = 50
"""Views lay themselves out anew in later turns of the event loop."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    window: QSize
    docks: dict[str, QSize] = field(default_factory=dict)
    """Of those that are seen, by name."""


class ZoomedSizes(QObject):
    """Of one window and its `docks`, by name."""

    def __init__(self, window: QMainWindow, docks: Mapping[str, QDockWidget], themes: ThemeKeeper) -> None:
        super().__init__(window)
        self._window, self._docks, self._themes = window, docks, themes
        self._wanted: _Sizes | None = None
        self._left: _Sizes | None = None
        """As they were after the last change of the zoom."""
        self._later = QTimer(self, singleShot=True, interval=_SETTLE_MS)
        self._later.timeout.connect(self._settle)
        themes.zooming.connect(self._note)

    def _note(self) -> None:
        """The zoom changes now."""
        if not self._window.isVisible():
            return
        if not self._later.isActive():
            now = self._now()
            if self._wanted is None or now != self._left:  # a person moved an edge meanwhile
                self._wanted = now
        self._later.start()

    def _settle(self) -> None:
        self._themes.finish()  # what is not seen asks for room as well
        wanted, window = self._wanted, self._window
        if wanted is None or not window.isVisible():
            return
        if not window.isMaximized() and not window.isFullScreen():
            window.resize(wanted.window)
        docked = {self._docks[name]: size for name, size in wanted.docks.items() if not self._docks[name].isFloating()}
        window.resizeDocks(list(docked), [size.width() for size in docked.values()], Qt.Orientation.Horizontal)
        window.resizeDocks(list(docked), [size.height() for size in docked.values()], Qt.Orientation.Vertical)
        self._left = self._now()

    def _now(self) -> _Sizes:
        layout = self._window.layout()
        if layout is not None:
            layout.activate()
        seen = {name: dock.size() for name, dock in self._docks.items() if not dock.visibleRegion().isEmpty()}
        return _Sizes(self._window.size(), seen)
