"""Holds the current theme and zoom for all windows: the user's choice, or the system's preference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from PySide6.QtCore import QObject, QSettings, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication

from kvscope_app.settings.settings import ZOOM_STEPS, Settings
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_app.ui.theme import SAFE_THEMES, THEMES, Theme
from kvscope_app.ui.theming.apply_theme import apply_theme, restyled
from kvscope_app.ui.zoom import apply_zoom, zoom_of

CHOICES: Final = ("auto", "dark", "light")
PALETTES: Final = {"usual": THEMES, "safe": SAFE_THEMES}
_RESTYLE_INTERVAL_MS: Final = 20
"""Interval between steps of restyling hidden widgets, so that visible ones are painted first."""


class ThemeManager(QObject):
    """Applies the theme to the application, and notifies widgets that paint themselves."""

    changed = Signal(object)
    """Emitted with the current `Theme` after a change of the theme or the zoom."""

    zooming = Signal()
    """Emitted before the zoom changes."""

    def __init__(self, app: QApplication, settings: QSettings, choice: str | None = None) -> None:
        """Apply the saved theme, or `choice` for this run only."""
        super().__init__(app)
        self._app = app
        self.settings = SettingsStore(settings, self)
        self.choice = choice or self.settings.values.theme
        self.theme: Theme = self._current_theme()
        apply_zoom(app, self.settings.values.zoom_percent)
        apply_theme(app, self.theme)
        self._waiting: list[Callable[[], None]] = []
        self._restyling: Iterator[None] = iter(())
        """Pending restyling, one part per step."""
        self._restyle_timer = QTimer(self, interval=_RESTYLE_INTERVAL_MS)
        self._restyle_timer.timeout.connect(self._restyle_more)
        app.styleHints().colorSchemeChanged.connect(self._update)
        app.applicationStateChanged.connect(self._on_application_state)
        self.settings.changed.connect(self._on_settings)

    def choose(self, choice: str) -> None:
        """Apply and save one of `CHOICES`."""
        self.choice = choice
        self.settings.change(theme=choice)
        self._update()

    def toggle(self) -> None:
        self.choose("light" if self.theme.is_dark else "dark")

    def choose_palette(self, palette: str) -> None:
        """Apply and save one of `PALETTES`."""
        self.settings.change(palette=palette)

    def zoom(self, steps: int) -> None:
        """Zoom in (positive) or out (negative) by one step, or reset to 100 % (0)."""
        now = self.settings.values.zoom_percent
        if steps > 0:
            wanted = next((step for step in ZOOM_STEPS if step > now), now)
        elif steps < 0:
            wanted = next((step for step in reversed(ZOOM_STEPS) if step < now), now)
        else:
            wanted = 100
        self.settings.change(zoom_percent=wanted)

    def call_later(self, work: Callable[[], None]) -> None:
        """Call `work` after the visible widgets were painted, unless another change comes first.

        For receivers of `changed`.
        """
        self._waiting.append(work)

    def finish(self) -> None:
        """Complete the pending restyling now, because hidden widgets are about to be shown."""
        while self._restyle_timer.isActive():
            self._restyle_more()

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        """Load settings that another process may have changed while this one was inactive."""
        if state == Qt.ApplicationState.ApplicationActive:
            self.settings.reload()

    def _on_settings(self, before: Settings) -> None:
        now = self.settings.values
        if now.theme != before.theme:
            self.choice = now.theme
        percent = now.zoom_percent
        if percent != zoom_of(self._app):
            self.zooming.emit()
            apply_zoom(self._app, percent)
            self._restyle(self._current_theme())
            return
        self._update()

    def _update(self) -> None:
        theme = self._current_theme()
        if theme is not self.theme:
            self._restyle(theme)

    def _restyle(self, theme: Theme) -> None:
        """Restyle visible widgets now and the others after those were painted."""
        self.theme = theme
        restyling = restyled(self._app, theme)
        next(restyling)
        self._waiting = []
        self.changed.emit(theme)
        self._restyling = chain(restyling, (work() for work in self._waiting))
        self._restyle_timer.start()

    def _restyle_more(self) -> None:
        if next(self._restyling, self) is self:
            self._restyle_timer.stop()
            self._restyling, self._waiting = iter(()), []  # they refer to windows

    def _current_theme(self) -> Theme:
        themes = PALETTES[self.settings.values.palette]
        if self.choice != "auto":
            return themes[self.choice]
        # Unknown without a platform theme: dark, as usual for monitoring tools.
        is_light = self._app.styleHints().colorScheme() == Qt.ColorScheme.Light
        return themes["light" if is_light else "dark"]
