"""Main window without its actions: session, central widgets, docks, and how to show them.

Owns the widgets in the center and the docks around them. Does not depend on the modules that add actions to it.
"""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSettings, Signal
from PySide6.QtWidgets import QApplication, QStackedWidget, QVBoxLayout, QWidget

from kvscope_app.alarms.alarm_evaluator import AlarmEvaluator
from kvscope_app.debugger.debugger import Debugger
from kvscope_app.engine_launcher.engine_supervisor import EngineSupervisor
from kvscope_app.planning.plan_process import PlanProcess
from kvscope_app.session.session import Session
from kvscope_app.session_window import Openers, SessionWindow
from kvscope_app.ui.model_name import model_name
from kvscope_app.ui.passing_strip import FloatingStrips
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.widget_factories import empty_state, label_boxes
from kvscope_app.views.capability_messages import DEVICES_ALONE
from kvscope_app.views.refresher import Refresher
from kvscope_app.window import dock_state
from kvscope_app.window.dock import Dock
from kvscope_app.window.docked_views import DockedViews
from kvscope_app.window.tab_stops import focus_next
from kvscope_app.window.welcome import Welcome


class WindowBody(SessionWindow):
    """Window with the page map or welcome page in the center, floating strips above it, and one dock for each other
    view.
    """

    linking = Signal(bool)
    """Emitted with True when the user links the shown time of all windows, and with False when the user ends
    the link.
    """
    link_changed = Signal()
    """Emitted after `link_text` or `may_link` was set."""

    def __init__(
        self,
        session: Session,
        themes: ThemeManager,
        settings: QSettings,
        supervisor: EngineSupervisor | None,
        openers: Openers,
    ) -> None:
        super().__init__(session, themes, settings, openers)
        self.supervisor = supervisor
        self.has_own_docks = True
        """Whether the user's arrangement of the docks is shown. False after the docks were rearranged for a source
        without a KV pool.
        """
        self._is_squeezed = False
        self.may_link, self.link_text = False, ""
        """`may_link`: whether another window is open whose shown time can be linked to that of this window.

        `link_text`: text about the linked windows; "" if the times are not linked.
        """
        self.setWindowTitle("kvscope")
        self.debugger = Debugger(session, self)
        self.plans = PlanProcess(self)
        self.closing.connect(self.plans.close)
        self.alarms = AlarmEvaluator(session, themes.settings, self)
        self.welcome = Welcome()
        self.refresher = Refresher(session, self)
        self.no_pool_label = empty_state(DEVICES_ALONE)
        self._build_center()
        dock_state.prepare(self)
        self.docked = DockedViews(self, session, themes, settings, self.refresher, self.undo)
        self.docks: dict[str, Dock] = self.docked.docks
        self.views = self.docked.views

    def show_map(self) -> None:
        """Show the page map in place of the welcome page, or a notice if the source has no KV pool."""
        live = self.session.live_mirror
        center = self.page_map if live.hello is None or live.capabilities.blocks else self.no_pool_label
        if self._stack.currentWidget() is not center:
            self._stack.setCurrentWidget(center)
            self.refresher.touch(self.page_map)
            self.setWindowTitle(self._title())
            self.show_capabilities()

    def show_capabilities(self) -> None:
        """Show the devices dock if the source has no blocks, because it then reports nothing but devices."""
        mirror = self.session.live_mirror
        if mirror.hello is not None and not mirror.capabilities.blocks:
            self.has_own_docks = False
            self.docks["devices"].show()
            self.docks["devices"].raise_()

    def add_below(self, bar: QWidget) -> None:
        label_boxes(bar)
        self._column.addWidget(bar)

    def reset_layout(self) -> None:
        """Restore the layout that is used at the first start."""
        dock_state.arrange(self, self.docks)
        self.docks["console"].setVisible(not self.session.timeline.is_file)

    def zoom_by(self, steps: int) -> None:
        """Zoom the page map in (1) or out (-1), or fit it into the view (0). Called if no focused view handles
        zooming itself.
        """
        (self.page_map.fit_all, self.page_map.zoom_in, self.page_map.zoom_out)[steps]()

    def event(self, event: QEvent) -> bool:
        if event.type() is QEvent.Type.LayoutRequest:
            self._limit_min_size()
        return super().event(event)

    def focusNextPrevChild(self, forward: bool) -> bool:
        focus = QApplication.focusWidget()
        if focus is not None and not focus.isVisible():
            # Qt looks for another widget because the focused one is being hidden, maybe inside restoreState: a dock
            # that gets the focus now crashes it.
            self.docked.move_focus_out_of_hidden_dock()
            return super().focusNextPrevChild(forward)
        return focus_next(self, forward=forward)

    def focus_view(self, name: str) -> None:
        self.docked.focus(name)

    def set_may_link(self, possible: bool) -> None:
        self.may_link = possible
        self.link_changed.emit()

    def set_link_text(self, text: str) -> None:
        if text != self.link_text:
            self.link_text = text
            self.link_changed.emit()

    def _limit_min_size(self) -> None:
        """Allow the window to be smaller than its minimum size hint if that exceeds the screen.

        Without an explicit minimum, the window grows to the size that its layout requires. With a large zoom or on a
        small screen, part of it would be off-screen.
        """
        available_size = self.screen().availableGeometry().size() - (self.frameGeometry().size() - self.size())
        min_size = self.minimumSizeHint()
        if min_size.boundedTo(available_size) != min_size:
            self._is_squeezed = True
            self.setMinimumSize(min_size.boundedTo(available_size))
            width, height = self.width(), self.height()
            if not self.isMaximized() and not self.isFullScreen():  # a size that a user chose stays
                self.resize(
                    available_size.width() if available_size.width() < width <= min_size.width() else width,
                    available_size.height() if available_size.height() < height <= min_size.height() else height,
                )
        elif self._is_squeezed:
            self._is_squeezed = False
            self.setMinimumSize(0, 0)  # the layout sets the minimum again

    def _build_center(self) -> None:
        self._stack = QStackedWidget()
        for page in (self.welcome, self.page_map, self.no_pool_label):
            self._stack.addWidget(page)
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
        suffix = "" if self.supervisor is not None else f" at {self.session.source.name}"
        if self.session.timeline.is_file:
            suffix = f" – {self.session.source.name}"
        return f"{name}{suffix} – kvscope" if name else "kvscope"
