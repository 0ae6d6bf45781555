"""Base class of the main window, with what features use: session, settings, actions, undo, messages and views.

The main window derives from it and adds the features. Features depend only on this class, not on the main window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QSettings, Signal
from PySide6.QtWidgets import QDockWidget, QMainWindow

from kvscope_app.actions.action_registry import Actions
from kvscope_app.actions.undo_stack import UndoStack
from kvscope_app.session.session import Session
from kvscope_app.ui.banner import Banner
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.views.base import View
from kvscope_app.views.page_map.page_map_view import PageMapView

if TYPE_CHECKING:
    from kvscope_telemetry.addresses import Address
    from kvscope_telemetry.recordings.reader import Recording


@dataclass(frozen=True, slots=True)
class Openers:
    """Functions that open other windows. A window offers no action for a function that is None."""

    attach: Callable[[Address], object] | None = None
    open_recording: Callable[[Recording], object] | None = None
    compare: Callable[[Recording, Recording, SessionWindow], object] | None = None
    """Opens a window that compares two recordings. The first is the recording of the given window."""
    open_fleet: Callable[[], object] | None = None


NO_OPENERS: Final = Openers()


class SessionWindow(QMainWindow):
    """Window that shows one session. A subclass fills `docks` and `views`."""

    closing = Signal(object)
    docks: Mapping[str, QDockWidget]
    views: Mapping[str, View]

    def __init__(self, session: Session, themes: ThemeManager, settings: QSettings, openers: Openers) -> None:
        super().__init__()
        self.session = session
        self.themes = themes
        self.settings = settings
        self.openers = openers
        self.undo = UndoStack(self)
        self.actions_by_name = Actions(self, themes.settings)
        self.banner = Banner(self)
        self.page_map = PageMapView(session)
