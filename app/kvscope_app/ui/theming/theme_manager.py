"""Current theme and zoom of all windows: the user's choice, or the system's preference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from PySide6.QtCore import QObject, QSettings, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication

from kvscope_app.settings.settings import ZOOM_STEPS, Settings
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_app.ui.theme import SAFE_THEMES, THEMES, Theme
from kvscope_app.ui.theming.apply_theme import apply_theme, restyle_in_steps
from kvscope_app.ui.zoom import apply_zoom, zoom_of

CHOICES: Final = ("auto", "dark", "light")
PALETTES: Final = {"usual": THEMES, "safe": SAFE_THEMES}
_RESTYLE_INTERVAL_MS: Final = 20
"""Interval between steps of restyling hidden widgets, so that visible widgets are painted first."""


class ThemeManager(QObject):
    changed = Signal(object)
    """Emitted with the current `Theme` after a change of the theme or the zoom."""

    zooming = Signal()
    """Emitted before the zoom changes."""

    def __init__(self, app: QApplication, settings: QSettings, choice: str | None = None) -> None:
        """Apply the saved theme or, for this run only, `choice`, one of `CHOICES`."""
        super().__init__(app)
        self._app = app
        self.settings = SettingsStore(settings, self)
        self.choice = choice or self.settings.values.theme
        self.theme: Theme = self._current_theme()
        apply_zoom(app, self.settings.values.zoom_percent)
        apply_theme(app, self.theme)
        self._postponed: list[Callable[[], None]] = []
        self._restyling: Iterator[None] = iter(())
        self._restyle_timer = QTimer(self, interval=_RESTYLE_INTERVAL_MS)
        self._restyle_timer.timeout.connect(self._restyle_more)
        app.styleHints().colorSchemeChanged.connect(self._update)
        app.applicationStateChanged.connect(self._on_application_state)
        self.settings.changed.connect(self._on_settings)

    def choose(self, choice: str) -> None:
        """Apply and save the theme `choice`, one of `CHOICES`."""
        self.choice = choice
        self.settings.change(theme=choice)
        self._update()

    def toggle(self) -> None:
        self.choose("light" if self.theme.is_dark else "dark")

    def choose_palette(self, palette: str) -> None:
        self.settings.change(palette=palette)

    def zoom(self, steps: int) -> None:
        """Zoom in (positive) or out (negative) by one step, or reset to 100 % (0)."""
        current = self.settings.values.zoom_percent
        if steps > 0:
            percent = next((step for step in ZOOM_STEPS if step > current), current)
        elif steps < 0:
            percent = next((step for step in reversed(ZOOM_STEPS) if step < current), current)
        else:
            percent = 100
        self.settings.change(zoom_percent=percent)

    def call_later(self, work: Callable[[], None]) -> None:
        """Call `work` after the visible widgets were painted, or never if another change comes first.

        For work that receivers of `changed` can postpone.
        """
        self._postponed.append(work)

    def finish(self) -> None:
        """Complete the restyling immediately, for example before hidden widgets are shown."""
        while self._restyle_timer.isActive():
            self._restyle_more()

    def _on_application_state(self, state: Qt.ApplicationState) -> None:
        """Reload the settings when the application becomes active. Another process may have changed them."""
        if state == Qt.ApplicationState.ApplicationActive:
            self.settings.reload()

    def _on_settings(self, old_settings: Settings) -> None:
        settings = self.settings.values
        if settings.theme != old_settings.theme:
            self.choice = settings.theme
        percent = settings.zoom_percent
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
        self.theme = theme
        restyling = restyle_in_steps(self._app, theme)
        next(restyling)
        self._postponed = []
        self.changed.emit(theme)
        self._restyling = chain(restyling, (work() for work in self._postponed))
        self._restyle_timer.start()

    def _restyle_more(self) -> None:
        if next(self._restyling, self) is self:
            self._restyle_timer.stop()
            self._restyling, self._postponed = iter(()), []  # they refer to windows

    def _current_theme(self) -> Theme:
        themes = PALETTES[self.settings.values.palette]
        if self.choice != "auto":
            return themes[self.choice]
        # Unknown without a platform theme: dark, as usual for monitoring tools.
        is_light = self._app.styleHints().colorScheme() == Qt.ColorScheme.Light
        return themes["light" if is_light else "dark"]
