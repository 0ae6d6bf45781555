"""Base class of the main window's views. Views keep no state except the user's choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from PySide6.QtCore import QSettings, Qt, Signal
from PySide6.QtWidgets import QWidget

from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK, Theme

HINT: Final = "hint"
"""Qt property of labels that explain what the user can do. If it is true, exported pictures omit the label."""


class View(QWidget):
    """Base class of the window's views.

    `Refresher` calls `refresh` at most `refresh_hz` times per second, only while the view is visible and its
    data changed (the page map on every update, which `session/poll_timer.py` limits to one per 16 ms). `apply_theme` is
    called once at startup and whenever the theme changes.
    """

    title: ClassVar[str] = ""
    object_name: ClassVar[str] = ""
    """Name of the view's dock in saved layouts. It must never change."""
    refresh_hz: ClassVar[float] = 10.0
    follows_page_map: ClassVar[bool] = False
    """Whether the view shows the first update after a pause at the same time as the page map, rather than some
    time later.
    """

    done = Signal(str, object, object)
    """Emitted after an undoable action, with a description ("deleting the chat") and functions that undo and redo it.
    """

    view_requested = Signal(str)
    """Emitted with the name of another view that the window should show and focus."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.theme: Theme = DARK
        self.closing_message = ""
        """Message that `shut_down` leaves for the user, to be shown when the view is gone; empty if there is none."""
        self.setObjectName(self.object_name)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)  # the stylesheet's background is painted
        self.setAccessibleName(self.title)

    def refresh(self) -> None:
        """Show the current contents of the session's mirror and history."""

    def became_visible(self) -> None:
        """Called when the view becomes visible again after its dock was closed or behind another dock."""

    def restore_settings(self, settings: QSettings) -> None:
        """Restore the user's choices from `settings`. Called once, before the view is shown."""

    def save_settings(self, settings: QSettings) -> None:
        """Save the user's choices to `settings`. Called when the window closes."""

    def draw_all(self) -> None:
        """Draw everything immediately, for an exported picture, even if `refresh` draws only a part per call."""
        self.refresh()

    @property
    def is_loaded(self) -> bool:
        """Whether `draw_all` can draw everything. Exporting a picture waits while data is being loaded."""
        return True

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        """Show a time range, in ns of the wall clock. Views without a time axis ignore it."""

    def dismiss(self) -> bool:
        return False

    def use_clock(self, clock: Callable[[], int]) -> None:
        """Use `clock` (ns) instead of the machine's clock for fading highlights. Called for a view that is drawn
        offscreen, for an exported picture or video.
        """

    def shut_down(self) -> None:
        """Stop threads and processes that the view started. Called when the window closes."""

    def apply_theme(self, theme: Theme) -> None:
        """Apply `theme`. Subclasses set the colours of what does not follow Qt's palette."""
        self.theme = theme
