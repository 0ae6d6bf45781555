"""Interface between the main window and its views. Views hold no state except the user's choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from PySide6.QtCore import QSettings, Qt, Signal
from PySide6.QtWidgets import QWidget

from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK, Theme

HINT: Final = "hint"
"""Qt property of labels that explain what the user can do; where it is true, exported pictures omit the label."""


class View(QWidget):
    """Base of the window's views.

    `window/refresher.py` calls `refresh` at most `refresh_hz` times per second, only while the view is visible and its
    data changed (the page map on every update, which `session/poll_timer.py` limits to one per 16 ms). `apply_theme` is
    called once at startup and whenever the theme changes.
    """

    title: ClassVar[str] = ""
    """Title of the dock."""
    object_name: ClassVar[str] = ""
    """Name of the dock in saved layouts; must never change."""
    refresh_hz: ClassVar[float] = 10.0
    in_step: ClassVar[bool] = False
    """Whether the view must agree with the page map: after a pause in the data, both show a new frame in the same
    turn."""

    done = Signal(str, object, object)
    """Emitted after an undoable action, with its description ("deleting the chat"), the function that undoes it, and
    the one that redoes it."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.theme: Theme = DARK
        self.closing_message = ""
        """Message that the user must still see after `shut_down`, when the view is gone."""
        self.setObjectName(self.object_name)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)  # the stylesheet's background is painted
        self.setAccessibleName(self.title)

    def refresh(self) -> None:
        """Paint the current contents of the session's mirror and history."""

    def became_visible(self) -> None:
        """Called when the view becomes visible again after its dock was closed or behind another."""

    def restore_settings(self, settings: QSettings) -> None:
        """Restore the user's choices from `settings`. Called once, before the view is shown."""

    def save_settings(self, settings: QSettings) -> None:
        """Save the user's choices to `settings`. Called when the window closes."""

    def draw_all(self) -> None:
        """Paint everything now, for an exported picture. Views that spread their work over several calls must do all of
        it."""
        self.refresh()

    @property
    def is_loaded(self) -> bool:
        """Whether `draw_all` can draw everything, because no data is still being loaded. Exporting a picture waits for
        it."""
        return True

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        """Show this range, in ns of the wall clock. Views without a time axis ignore it."""

    def dismiss(self) -> bool:
        """Close what Esc closes in this view. Returns whether anything was closed."""
        return False

    def use_clock(self, clock: Callable[[], int]) -> None:
        """Use `clock` (ns) for fading, because the time in a video is not the machine's."""

    def shut_down(self) -> None:
        """Stop what the view started. Called when the window closes."""

    def apply_theme(self, theme: Theme) -> None:
        """Apply `theme`. Subclasses recolour what does not follow Qt's palette."""
        self.theme = theme
