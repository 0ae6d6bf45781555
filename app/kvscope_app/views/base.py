"""The interface that the main window needs of each view. Views hold no state but what the user chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from PySide6.QtCore import QSettings, Qt, Signal
from PySide6.QtWidgets import QWidget

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.session.session import Session

HINT: Final = "hint"
"""A property of words that say what a person can do here: where it is true, pictures leave them out."""


class View(QWidget):
    """One panel of the window.

    `window/refresher.py` calls `refresh` at most `refresh_hz` times a second, only while the view is in sight and what
    is shown changed (the page map with every update, which `session/pace.py` bounds to one each 16 ms); `apply_theme`
    once at the start and whenever the theme changes.
    """

    title: ClassVar[str] = ""
    """What a person reads on the dock."""
    object_name: ClassVar[str] = ""
    """Name of the dock in saved layouts: never changes."""
    refresh_hz: ClassVar[float] = 10.0
    in_step: ClassVar[bool] = False
    """Whether it counts what the page map shows: a frame that comes alone is shown by both at once."""

    done = Signal(str, object, object)
    """Something was done that can be undone: in words ("deleting the chat"), what undoes it, what does it again."""

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.theme: Theme = DARK
        self.last_words = ""
        """What a person must read though the view is gone, after `shut_down`."""
        self.setObjectName(self.object_name)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)  # the stylesheet's background is painted
        self.setAccessibleName(self.title)

    def refresh(self) -> None:
        """Paint what the session's mirror and history hold now."""

    def came_in_sight(self) -> None:
        """It is seen again: its dock was closed, or behind another."""

    def recall(self, settings: QSettings) -> None:
        """Take what was chosen last time; once, before it is shown."""

    def remember(self, settings: QSettings) -> None:
        """Keep what the person chose; the window closes."""

    def draw_all(self) -> None:
        """Paint all of it now: a picture is taken. Views that share their work out over several calls do all of it."""
        self.refresh()

    @property
    def is_settled(self) -> bool:
        """Whether `draw_all` draws all: nothing more comes from elsewhere of what is shown now. A picture waits."""
        return True

    def show_range(self, begin_ns: int, end_ns: int) -> None:
        """A view on time shows this range, by the wall clock; the others have none."""

    def dismiss(self) -> bool:
        """Close what Esc closes in this view; whether there was any."""
        return False

    def use_clock(self, clock: Callable[[], int]) -> None:
        """What fades, fades by this clock in ns: a video's time is not the machine's."""

    def shut_down(self) -> None:
        """The window closes: end what was started."""

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`; subclasses recolour what does not follow the palette."""
        self.theme = theme
