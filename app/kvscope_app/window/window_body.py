"""What a window is made of, as those see it that act on it: its session, its parts, and how they are brought up.

Owns the parts in the middle and the docks around them. Knows nobody who acts on it: who adds actions is told of it.
"""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSettings, Signal
from PySide6.QtWidgets import QApplication, QStackedWidget, QVBoxLayout, QWidget

from kvscope_app.debugger.debugger import Debugger
from kvscope_app.look.makers import empty_state, label_boxes
from kvscope_app.look.model_name import model_name
from kvscope_app.look.passing_strip import FloatingStrips
from kvscope_app.look.theming.theme_keeper import ThemeKeeper
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_app.own_engine.engine_keeper import EngineKeeper
from kvscope_app.planning.plan_process import PlanProcess
from kvscope_app.session.session import Session
from kvscope_app.session_window import Openers, SessionWindow
from kvscope_app.views.capability_messages import DEVICES_ALONE
from kvscope_app.views.refresher import Refresher
from kvscope_app.window import layout
from kvscope_app.window.dock import Dock
from kvscope_app.window.docked_views import DockedViews
from kvscope_app.window.tab_stops import focus_next
from kvscope_app.window.welcome import Welcome


class WindowBody(SessionWindow):
    """The page map or the welcome in the middle, strips that float over it, and a dock for each other view."""

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
        super().__init__(session, themes, settings, openers)
        self.keeper = keeper
        self.has_own_docks = True
        """The docks are where a person wants them; false once they were moved for an address that has no pool."""
        self._is_squeezed = False
        self.may_link, self.link_words = False, ""
        """Whether there is another window whose time may be linked with this one's, and how it is; empty: it is not."""
        self.setWindowTitle("kvscope")
        self.debugger = Debugger(session, self)
        self.plans = PlanProcess(self)
        self.closing.connect(self.plans.close)
        self.alarms = AlarmWatch(session, themes.settings, self)
        self.welcome = Welcome()
        self.refresher = Refresher(session, self)
        self.no_pool_label = empty_state(DEVICES_ALONE)
        self._build_middle()
        layout.prepare(self)
        self.docked = DockedViews(self, session, themes, settings, self.refresher, self.undo)
        self.docks: dict[str, Dock] = self.docked.docks
        self.views = self.docked.views

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
        label_boxes(bar)
        self._column.addWidget(bar)

    def reset_layout(self) -> None:
        """Everything where it was at the first start."""
        layout.arrange(self, self.docks)
        self.docks["console"].setVisible(not self.session.timeline.is_file)

    def zoom_by(self, steps: int) -> None:
        """The page map, while nothing else that can be zoomed has the keyboard."""
        (self.page_map.fit_all, self.page_map.zoom_in, self.page_map.zoom_out)[steps]()

    def event(self, event: QEvent) -> bool:
        if event.type() is QEvent.Type.LayoutRequest:
            self._stay_on_screen()
        return super().event(event)

    def focusNextPrevChild(self, forward: bool) -> bool:
        focus = QApplication.focusWidget()
        if focus is not None and not focus.isVisible():
            # Qt looks for another widget because the focused one is being hidden, maybe inside restoreState: a dock
            # that gets the focus now crashes it.
            self.docked.pass_focus_on()
            return super().focusNextPrevChild(forward)
        return focus_next(self, forward=forward)

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

    def _stay_on_screen(self) -> None:
        """Let the window be smaller than its parts ask for, where they ask for more than the screen has.

        Without a minimum of its own the window grows to what its layout needs: at large zooms and on small screens a
        part of it would be outside the screen.
        """
        room = self.screen().availableGeometry().size() - (self.frameGeometry().size() - self.size())
        least = self.minimumSizeHint()
        if least.boundedTo(room) != least:
            self._is_squeezed = True
            self.setMinimumSize(least.boundedTo(room))
            width, height = self.width(), self.height()
            if not self.isMaximized() and not self.isFullScreen():  # a size that a user chose stays
                self.resize(
                    room.width() if room.width() < width <= least.width() else width,
                    room.height() if room.height() < height <= least.height() else height,
                )
        elif self._is_squeezed:
            self._is_squeezed = False
            self.setMinimumSize(0, 0)  # the layout sets it again

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
        self.strips.covered.connect(self.page_map.canvas.set_covered_height)
        self.strips.add(self.banner)
        self.setCentralWidget(body)

    def _title(self) -> str:
        name = model_name(self.session.live_mirror.hello)
        where = "" if self.keeper is not None else f" at {self.session.source.name}"
        if self.session.timeline.is_file:
            where = f" – {self.session.source.name}"
        return f"{name}{where} – kvscope" if name else "kvscope"
