"""Which theme is on: the person's choice, or what the system prefers. One for all windows."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QObject, QSettings, Qt, Signal
from PySide6.QtWidgets import QApplication

from kvscope_app.look.apply_theme import apply_theme
from kvscope_app.look.theme import DARK, LIGHT, THEMES, Theme
from kvscope_app.setting_names import THEME

CHOICES: Final = ("auto", "dark", "light")


class ThemeKeeper(QObject):
    """Applies the theme to the application and tells whoever paints for himself."""

    changed = Signal(object)
    """The `Theme` that is on now."""

    def __init__(self, app: QApplication, settings: QSettings, choice: str | None = None) -> None:
        """`choice` is for this run alone; without it, what was chosen last time."""
        super().__init__(app)
        self._app = app
        self._settings = settings
        saved = str(settings.value(THEME, "auto"))
        self.choice = choice or (saved if saved in CHOICES else "auto")
        self.theme: Theme = self._wanted()
        apply_theme(app, self.theme)
        app.styleHints().colorSchemeChanged.connect(self._follow)

    def choose(self, choice: str) -> None:
        """Take and remember a choice of `CHOICES`."""
        self.choice = choice
        self._settings.setValue(THEME, choice)
        self._follow()

    def toggle(self) -> None:
        """The other of dark and light."""
        self.choose("light" if self.theme.is_dark else "dark")

    def _follow(self) -> None:
        theme = self._wanted()
        if theme is not self.theme:
            self.theme = theme
            apply_theme(self._app, theme)
            self.changed.emit(theme)

    def _wanted(self) -> Theme:
        if self.choice != "auto":
            return THEMES[self.choice]
        # Unknown without a platform theme: dark, as monitors are.
        return LIGHT if self._app.styleHints().colorScheme() == Qt.ColorScheme.Light else DARK
