"""Notices what a person does to the docks, so that it can be undone. Knows Qt's packed layouts, not what is in them."""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtCore import QByteArray, QObject, QTimer

from kvscope_app.setting_names import LAYOUT_VERSION
from kvscope_app.window.dock import Dock
from kvscope_app.window.window_body import WindowBody

_SETTLE_MS: Final = 250
"""Moving one dock moves others, and sizes follow in later turns of the event loop."""


class LayoutWatch(QObject):
    """Of one window, from when all its views are there."""

    def __init__(self, window: WindowBody) -> None:
        super().__init__(window)
        self._window = window
        self._settled: QByteArray | None = None
        self._words = ""
        self._clock = QTimer(self, singleShot=True, interval=_SETTLE_MS)
        self._clock.timeout.connect(self._settle)
        for dock in window.docks.values():
            dock.toggleViewAction().toggled.connect(partial(self._on_shown, dock))
            dock.topLevelChanged.connect(partial(self._on_floated, dock))
            dock.dockLocationChanged.connect(partial(self._on_moved, dock))

    def begin(self) -> None:
        """Where the docks are now is what the first undo goes back to."""
        self._settled = self._window.saveState(LAYOUT_VERSION)

    def about_to(self, words: str) -> None:
        """The whole layout changes now, in one go."""
        if self._settled is not None and not self._window.undo.is_at_work:
            self._settled = self._window.saveState(LAYOUT_VERSION)  # with sizes as they are
            self._words = words
            self._clock.start()

    def _on_shown(self, dock: Dock, shown: bool) -> None:
        self._note(f"{'opening' if shown else 'closing'} {dock.windowTitle().lower()}")

    def _on_floated(self, dock: Dock, floats: bool) -> None:
        self._note(f"{'taking out' if floats else 'putting back'} {dock.windowTitle().lower()}")

    def _on_moved(self, dock: Dock, *_: object) -> None:
        self._note(f"moving {dock.windowTitle().lower()}")

    def _note(self, words: str) -> None:
        """The first words of a change name it: what follows from it is not what the person did."""
        if self._settled is None or self._window.undo.is_at_work or not self._window.isVisible():
            return
        self._words = self._words or words
        self._clock.start()

    def _settle(self) -> None:
        before, words = self._settled, self._words
        self._words = ""
        now = self._window.saveState(LAYOUT_VERSION)
        self._settled = now
        if words and before is not None and now != before:
            self._window.undo.did(words, partial(self._put, before), partial(self._put, now))

    def _put(self, state: QByteArray) -> None:
        self._window.restoreState(state, LAYOUT_VERSION)
        self._settled = self._window.saveState(LAYOUT_VERSION)
