"""The window of one session, as features use it: its session, settings, actions, undo, messages and views.

The main window is built on it and adds what it assembles from the features. Features are given this class, so that they
do not depend on the main window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QSettings, Signal
from PySide6.QtWidgets import QDockWidget, QMainWindow

from kvscope_app.actions.action_registry import Actions
from kvscope_app.actions.undo_stack import UndoStack
from kvscope_app.look.banner import Banner
from kvscope_app.look.theming.theme_keeper import ThemeKeeper
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.page_map.page_map_view import PageMapView

if TYPE_CHECKING:
    from kvscope_telemetry.addresses import Address
    from kvscope_telemetry.recordings.reader import Recording


@dataclass(frozen=True, slots=True)
class Openers:
    """Functions that open other windows. Where one is None, a window does not offer it."""

    attach: Callable[[Address], object] | None = None
    """A window on another engine."""
    open_recording: Callable[[Recording], object] | None = None
    """A window on a recording."""
    compare: Callable[[Recording, Recording, SessionWindow], object] | None = None
    """A window on two timelines side by side; the first is that of the window."""
    open_fleet: Callable[[], object] | None = None
    """A table of all engines that are attached or remembered."""


NO_OPENERS: Final = Openers()


class SessionWindow(QMainWindow):
    """Shows one session. A subclass fills `docks` and `views`."""

    closing = Signal(object)
    """The window itself, for the last time."""
    docks: Mapping[str, QDockWidget]
    """Docks by the name of the view in each."""
    views: Mapping[str, View]
    """The views that are loaded, by name."""

    def __init__(self, session: Session, themes: ThemeKeeper, settings: QSettings, openers: Openers) -> None:
        super().__init__()
        self.session = session
        self.themes = themes
        self.settings = settings
        self.openers = openers
        self.undo = UndoStack(self)
        self.actions_by_name = Actions(self, themes.settings)
        self.banner = Banner(self)
        self.page_map = PageMapView(session)
