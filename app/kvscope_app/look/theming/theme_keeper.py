"""Which theme is on and how large all is: the person's choice, or what the system prefers. One for all windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from PySide6.QtCore import QObject, QSettings, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication

from kvscope_app.look.theme import SAFE_THEMES, THEMES, Theme
from kvscope_app.look.theming.apply_theme import apply_theme, restyled
from kvscope_app.look.zoom import apply_zoom, zoom_of
from kvscope_app.settings.settings import ZOOM_STEPS, Settings
from kvscope_app.settings.settings_keeper import SettingsKeeper

CHOICES: Final = ("auto", "dark", "light")
PALETTES: Final = {"usual": THEMES, "safe": SAFE_THEMES}
_UNSEEN_MS: Final = 20
"""Between turns of the event loop that restyle what is not seen: what is seen is painted first."""


class ThemeKeeper(QObject):
    """Applies the theme to the application and tells whoever paints for himself."""

    changed = Signal(object)
    """The `Theme` that is on now. It is told as well when all becomes larger or smaller."""

    zooming = Signal()
    """All becomes larger or smaller now."""

    def __init__(self, app: QApplication, settings: QSettings, choice: str | None = None) -> None:
        """`choice` is for this run alone; without it, what was chosen last time."""
        super().__init__(app)
        self._app = app
        self.settings = SettingsKeeper(settings, self)
        self.choice = choice or self.settings.values.theme
        self.theme: Theme = self._wanted()
        apply_zoom(app, self.settings.values.zoom_percent)
        apply_theme(app, self.theme)
        self._waiting: list[Callable[[], None]] = []
        self._unseen: Iterator[None] = iter(())
        """What is still to be restyled, a part a step."""
        self._turns = QTimer(self, interval=_UNSEEN_MS)
        self._turns.timeout.connect(self._restyle_more)
        app.styleHints().colorSchemeChanged.connect(self._follow)
        app.applicationStateChanged.connect(self._look)
        self.settings.changed.connect(self._on_settings)

    def choose(self, choice: str) -> None:
        """Take and remember a choice of `CHOICES`."""
        self.choice = choice
        self.settings.change(theme=choice)
        self._follow()

    def toggle(self) -> None:
        """The other of dark and light."""
        self.choose("light" if self.theme.is_dark else "dark")

    def choose_palette(self, palette: str) -> None:
        """Take and remember one of `PALETTES`."""
        self.settings.change(palette=palette)

    def zoom(self, steps: int) -> None:
        """So many steps larger, smaller, or back to 100 % for none."""
        now = self.settings.values.zoom_percent
        if steps > 0:
            wanted = next((step for step in ZOOM_STEPS if step > now), now)
        elif steps < 0:
            wanted = next((step for step in reversed(ZOOM_STEPS) if step < now), now)
        else:
            wanted = 100
        self.settings.change(zoom_percent=wanted)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Whoever is told of a change has this done once what is seen was painted, unless all changes again first."""
        self._waiting.append(work)

    def finish(self) -> None:
        """Do now what waits for its turn: something comes in sight."""
        while self._turns.isActive():
            self._restyle_more()

    def _look(self, state: Qt.ApplicationState) -> None:
        """Another desktop may have changed something while this one had no focus."""
        if state == Qt.ApplicationState.ApplicationActive:
            self.settings.look()

    def _on_settings(self, before: Settings) -> None:
        now = self.settings.values
        if now.theme != before.theme:
            self.choice = now.theme
        percent = now.zoom_percent
        if percent != zoom_of(self._app):
            self.zooming.emit()
            apply_zoom(self._app, percent)
            self._restyle(self._wanted())
            return
        self._follow()

    def _follow(self) -> None:
        theme = self._wanted()
        if theme is not self.theme:
            self._restyle(theme)

    def _restyle(self, theme: Theme) -> None:
        """What is seen at once, the rest after it was painted."""
        self.theme = theme
        restyling = restyled(self._app, theme)
        next(restyling)
        self._waiting = []
        self.changed.emit(theme)
        self._unseen = chain(restyling, (work() for work in self._waiting))
        self._turns.start()

    def _restyle_more(self) -> None:
        if next(self._unseen, self) is self:
            self._turns.stop()
            self._unseen, self._waiting = iter(()), []  # they know windows

    def _wanted(self) -> Theme:
        themes = PALETTES[self.settings.values.palette]
        if self.choice != "auto":
            return themes[self.choice]
        # Unknown without a platform theme: dark, as monitors are.
        is_light = self._app.styleHints().colorScheme() == Qt.ColorScheme.Light
        return themes["light" if is_light else "dark"]
