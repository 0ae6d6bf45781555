"""What a window is made of, as those see it that act on it: its session, its parts, and how they are brought up.

Owns the parts in the middle and the docks around them. Knows nobody who acts on it: who adds actions is told of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QSettings, Signal
from PySide6.QtWidgets import QMainWindow, QStackedWidget, QVBoxLayout, QWidget

from kvscope_app.debugger.debugger import Debugger
from kvscope_app.look.makers import empty_state
from kvscope_app.look.model_name import model_name
from kvscope_app.look.passing_strip import FloatingStrips
from kvscope_app.look.theming.theme_keeper import ThemeKeeper
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_app.own_engine.engine_keeper import EngineKeeper
from kvscope_app.planning.plan_process import PlanProcess
from kvscope_app.session.session import Session
from kvscope_app.views.capability_messages import DEVICES_ALONE
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_app.window import layout
from kvscope_app.window.actions import Actions
from kvscope_app.window.banner import Banner
from kvscope_app.window.docked_views import DockedViews
from kvscope_app.window.refresher import Refresher
from kvscope_app.window.undo_stack import UndoStack
from kvscope_app.window.welcome import Welcome

if TYPE_CHECKING:
    from kvscope_app.library.library import Library
    from kvscope_telemetry.addresses import Address
    from kvscope_telemetry.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Openers:
    """What opens other windows, given by who keeps them. What is None is not offered."""

    attach: Callable[[Address], object] | None = None
    """A window on another engine."""
    open_recording: Callable[[Recorded], object] | None = None
    """A window on a recording."""
    compare: Callable[[Recorded, Recorded, WindowBody], object] | None = None
    """A window on two timelines side by side; the first is that of the window."""
    open_fleet: Callable[[], object] | None = None
    """A table of all engines that are attached or remembered."""
    library: Library | None = None
    """The recordings that are listed."""


NO_OPENERS: Final = Openers()


class WindowBody(QMainWindow):
    """The page map or the welcome in the middle, strips that float over it, and a dock for each other view."""

    closing = Signal(object)
    """The window itself, for the last time."""
    linking = Signal(bool)
    """The person links the times of all windows, or no longer."""
    link_changed = Signal()
    """`link_words` or `may_link` may be others now."""

    def __init__(
        self,
        session: Session,
        themes: ThemeKeeper,
        settings: QSettings,
        keeper: EngineKeeper | None,
        openers: Openers,
    ) -> None:
        super().__init__()
        self.session = session
        self.themes = themes
        self.settings = settings
        self.keeper = keeper
        self.openers = openers
        self.has_own_docks = True
        """The docks are where a person wants them; false once they were moved for an address that has no pool."""
        self.may_link, self.link_words = False, ""
        """Whether there is another window whose time may be linked with this one's, and how it is; empty: it is not."""
        self.setWindowTitle("kvscope")
        self.undo = UndoStack(self)
        self.actions_by_name = Actions(self, themes.settings)
        self.debugger = Debugger(session, self)
        self.plans = PlanProcess(self)
        self.closing.connect(self.plans.close)
        self.alarms = AlarmWatch(session, themes.settings, self)
        self.banner = Banner(self)
        self.welcome = Welcome()
        self.page_map = PageMapView(session)
        self.refresher = Refresher(session, self)
        self.no_pool_label = empty_state(DEVICES_ALONE)
        self._build_middle()
        layout.prepare(self)
        self.docked = DockedViews(self, session, themes, settings, self.refresher, self.undo)
        self.docks, self.views = self.docked.docks, self.docked.views

    def show_map(self) -> None:
        """There is a pool to look at."""
        live = self.session.live_mirror
        middle = self.page_map if live.hello is None or live.capabilities.blocks else self.no_pool_label
        if self._stack.currentWidget() is not middle:
            self._stack.setCurrentWidget(middle)
            self.refresher.touch(self.page_map)
            self.setWindowTitle(self._title())
            self.show_capabilities()

    def show_capabilities(self) -> None:
        """Where devices are all that the source tells of, they are in sight, wherever the docks were left."""
        mirror = self.session.live_mirror
        if mirror.hello is not None and not mirror.capabilities.blocks:
            self.has_own_docks = False
            self.docks["devices"].show()
            self.docks["devices"].raise_()

    def add_below(self, bar: QWidget) -> None:
        """Put `bar` under the map."""
        self._column.addWidget(bar)

    def reset_layout(self) -> None:
        """Everything where it was at the first start."""
        layout.arrange(self, self.docks)
        self.docks["console"].setVisible(not self.session.timeline.is_file)

    def zoom_by(self, steps: int) -> None:
        """The page map, while nothing else that can be zoomed has the keyboard."""
        (self.page_map.fit_all, self.page_map.zoom_in, self.page_map.zoom_out)[steps]()

    def focus_view(self, name: str) -> None:
        """Bring a dock up and give it the keyboard."""
        self.docked.focus(name)

    def can_link(self, possible: bool) -> None:
        """Whether there is another window whose time may be linked with this one's."""
        self.may_link = possible
        self.link_changed.emit()

    def show_linked(self, words: str) -> None:
        """How this window's time is linked with that of the others; empty: it is not."""
        if words != self.link_words:
            self.link_words = words
            self.link_changed.emit()

    def _build_middle(self) -> None:
        self._stack = QStackedWidget()
        for middle in (self.welcome, self.page_map, self.no_pool_label):
            self._stack.addWidget(middle)
        body = QWidget()
        body.setObjectName("central")
        self._column = QVBoxLayout(body)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(0)
        self._column.addWidget(self._stack, 1)
        self.strips = FloatingStrips(self._stack, self.page_map.canvas)
        self.strips.add(self.banner)
        self.setCentralWidget(body)

    def _title(self) -> str:
        name = model_name(self.session.live_mirror.hello)
        where = "" if self.keeper is not None else f" at {self.session.source.name}"
        if self.session.timeline.is_file:
            where = f" – {self.session.source.name}"
        return f"{name}{where} – kvscope" if name else "kvscope"
