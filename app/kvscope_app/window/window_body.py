"""What a window is made of, as those see it that act on it: its session, its parts, and how they are brought up.

Owns the parts in the middle and the docks around them. Knows no actions, and nobody who acts on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from PySide6.QtCore import QObject, QSettings, Qt, Signal
from PySide6.QtGui import QUndoCommand, QUndoStack
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
from kvscope_app.views.base import View
from kvscope_app.views.capability_messages import DEVICES_ALONE
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.page_map import PageMapView
from kvscope_app.window import layout
from kvscope_app.window.actions import Actions
from kvscope_app.window.banner import Banner
from kvscope_app.window.dock import Dock
from kvscope_app.window.refresher import Refresher
from kvscope_app.window.welcome import Welcome

if TYPE_CHECKING:
    from kvscope_app.library.library import Library
    from kvscope_telemetry.addresses import Address
    from kvscope_telemetry.recorded import Recorded

_MAX_STEPS: Final = 100


class Notices(Protocol):
    """What a person can ask of who tells about the engine."""

    def restart(self) -> None:
        """End the engine and start it anew."""

    def restart_with(self, flag: str, value: str) -> None:
        """The same with another option of the engine."""

    def show_log(self) -> None:
        """What the engine printed."""

    def forget(self) -> None:
        """The window closes."""


class WindowBody(QMainWindow):
    """The page map or the welcome in the middle, strips that float over it, and a dock for each other view."""

    closing = Signal(object)
    """The window itself, for the last time."""
    linking = Signal(bool)
    """The person links the times of all windows, or no longer."""
    notices: Notices
    actions_by_name: Actions
    settings: QSettings
    alarms: AlarmWatch
    compare: Callable[[Recorded, Recorded], object] | None = None
    """Opens a window on two timelines side by side."""
    open_fleet: Callable[[], object] | None = None
    """Opens a table of all engines that are attached or remembered."""

    def __init__(
        self,
        session: Session,
        themes: ThemeKeeper,
        keeper: EngineKeeper | None,
        attach: Callable[[Address], None] | None,
        open_recording: Callable[[Recorded], object] | None,
    ) -> None:
        super().__init__()
        self.session = session
        self.themes = themes
        self.keeper = keeper
        self.attach = attach
        self.open_recording = open_recording
        self.library: Library | None = None
        """The recordings that are listed; given by who opens windows."""
        self.views: dict[str, View] = {}
        self.docks: dict[str, Dock] = {}
        self.has_own_docks = True
        """The docks are where a person wants them; false once they were moved for an address that has no pool."""
        self.undo = UndoStack(self)
        self.setWindowTitle("kvscope")
        self.debugger = Debugger(session, self)
        self.plans = PlanProcess(self)
        self.closing.connect(self.plans.close)
        self.banner = Banner(self)
        self.welcome = Welcome()
        self.page_map = PageMapView(session)
        self.refresher = Refresher(session, self)
        self._build_body()
        self._build_docks()

    def show_map(self) -> None:
        """There is a pool to look at."""
        told = self.session.live_mirror
        middle = self.page_map if told.hello is None or told.capabilities.blocks else self._no_pool
        if self._stack.currentWidget() is not middle:
            self._stack.setCurrentWidget(middle)
            self.refresher.touch(self.page_map)
            self.setWindowTitle(self._title())
            self.show_what_is_told()

    def show_what_is_told(self) -> None:
        """Where devices are all that the source tells of, they are in sight, wherever the docks were left."""
        mirror = self.session.live_mirror
        if mirror.hello is not None and not mirror.capabilities.blocks:
            self.has_own_docks = False
            self.docks["devices"].show()
            self.docks["devices"].raise_()

    def reset_layout(self) -> None:
        """Everything where it was at the first start."""
        layout.arrange(self, self.docks)
        self.docks["console"].setVisible(not self.session.timeline.is_file)

    def zoom_by(self, steps: int) -> None:
        """The page map, while nothing else that can be zoomed has the keyboard."""
        (self.page_map.fit_all, self.page_map.zoom_in, self.page_map.zoom_out)[steps]()

    def focus_view(self, name: str) -> None:
        """Bring a dock up and give it the keyboard."""
        dock = self.docks[name]
        dock.show()
        dock.raise_()
        if name in self.views:
            self.views[name].setFocus(Qt.FocusReason.ShortcutFocusReason)

    def _build_body(self) -> None:
        self._stack = QStackedWidget()
        self._stack.addWidget(self.welcome)
        self._stack.addWidget(self.page_map)
        self._no_pool = empty_state(DEVICES_ALONE)
        self._stack.addWidget(self._no_pool)
        body = QWidget()
        body.setObjectName("central")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self._stack, 1)
        self._body = column
        self.strips = FloatingStrips(self._stack, self.page_map.canvas)
        self.strips.add(self.banner)
        self.setCentralWidget(body)

    def _build_docks(self) -> None:
        layout.prepare(self)
        for spec in DOCKS:
            dock = Dock(spec.title, spec.name, self)
            dock.visibilityChanged.connect(partial(self._dock_seen, spec.name))
            self.docks[spec.name] = dock

    def _dock_seen(self, name: str, seen: bool) -> None:
        if seen and name in self.views:
            self.themes.finish()
            self.views[name].came_in_sight()
            self.refresher.touch(self.views[name])

    def _title(self) -> str:
        name = model_name(self.session.live_mirror.hello)
        where = "" if self.keeper is not None else f" at {self.session.source.name}"
        if self.session.timeline.is_file:
            where = f" – {self.session.source.name}"
        return f"{name}{where} – kvscope" if name else "kvscope"


class UndoStack(QUndoStack):
    """What can be undone in a window, in the order it was done.

    Whoever did something tells how it is taken back: `window.undo.did("deleting the chat", undo, redo)`.

    Of one window.
    """

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.setUndoLimit(_MAX_STEPS)
        self.is_at_work = False
        """Something is undone or done again now: what changes is not news."""

    def did(self, words: str, undo: Callable[[], object], redo: Callable[[], object]) -> None:
        """Something was done, said in `words` as after "Undo": "closing the memory dock"."""
        self.push(_Done(words, undo, redo, self))

    def forget(self) -> None:
        """The window closes: nothing is undone any more, and nobody is to be told."""
        self.blockSignals(True)
        self.clear()


class _Done(QUndoCommand):
    def __init__(self, words: str, undo: Callable[[], object], redo: Callable[[], object], stack: UndoStack) -> None:
        super().__init__(words)
        self._undo, self._redo, self._stack = undo, redo, stack
        self._is_new = True

    def undo(self) -> None:
        self._do(self._undo)

    def redo(self) -> None:
        """Qt calls it when it is pushed as well: it is done already then."""
        if self._is_new:
            self._is_new = False
            return
        self._do(self._redo)

    def _do(self, what: Callable[[], object]) -> None:
        self._stack.is_at_work = True
        try:
            what()
        finally:
            self._stack.is_at_work = False
