"""The main window: the page map in the middle, the other views docked around it.

Owns layout and the wiring between session, views and actions. Knows neither how views draw nor how an engine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import shiboken6
from PySide6.QtCore import QEvent, QSettings, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QShowEvent

from kvscope_app.debugger.debug_actions import NUM_STEPS
from kvscope_app.debugger.paused_bar import PausedBar
from kvscope_app.debugger.selection_menus import add_to_requests
from kvscope_app.library.drop_sign import DropSign
from kvscope_app.library.offers import accept_drag, offer_recordings, open_dropped
from kvscope_app.look.theme import Theme
from kvscope_app.look.theming.theme_keeper import ThemeKeeper
from kvscope_app.marks.alarm_strip import AlarmStrip
from kvscope_app.marks.alarm_watch import AlarmWatch
from kvscope_app.marks.mark_actions import offer_undo
from kvscope_app.own_engine.engine_keeper import EngineKeeper
from kvscope_app.playback.playback_bar import PlaybackBar
from kvscope_app.recording.text_agreement import follow_agreement
from kvscope_app.session.session import Session
from kvscope_app.setting_names import window_group
from kvscope_app.views.base import View
from kvscope_app.views.docks import DOCKS, DockSpec
from kvscope_app.views.in_sight import in_sight
from kvscope_app.window import layout
from kvscope_app.window.actions import Actions
from kvscope_app.window.arranging.kept_layouts import KeptLayouts
from kvscope_app.window.arranging.layout_watch import LayoutWatch
from kvscope_app.window.arranging.zoomed_sizes import ZoomedSizes
from kvscope_app.window.engine_notices import EngineNotices
from kvscope_app.window.menu_corner import Corner
from kvscope_app.window.remembered import note_widths, remember_map, remember_view
from kvscope_app.window.status_bar import StatusBar
from kvscope_app.window.window_actions import add_actions, build_menus
from kvscope_app.window.window_body import WindowBody

if TYPE_CHECKING:
    from kvscope_telemetry.addresses import Address
    from kvscope_telemetry.recorded import Recorded

_FIRST_VIEW_MS: Final = 40
"""After the window is shown: first it paints."""


class MainWindow(WindowBody):
    """Shows one session. `keeper` is there when the engine is the desktop's own."""

    views_loaded = Signal()
    """All docked views are there (they are imported after the first paint)."""
    _next_view = Signal()
    _last_view = Signal()
    """To itself, in the next turn of the event loop. What `QTimer.singleShot` is to call at 0 ms is held for ever when
    the window closes before its turn."""

    def __init__(
        self,
        session: Session,
        themes: ThemeKeeper,
        settings: QSettings,
        keeper: EngineKeeper | None = None,
        attach: Callable[[Address], None] | None = None,
        open_recording: Callable[[Recorded], object] | None = None,
        slot: int = 1,
    ) -> None:
        """`attach` opens another window on another engine, `open_recording` one on a recording.

        Without one it is not offered. `slot`: which of the open windows of its kind it is, from 1: each remembers its
        own place.
        """
        super().__init__(session, themes, keeper, attach, open_recording)
        self.slot = slot
        self.last_words = ""
        """What a person must read though the window is gone, once it is `closing`."""
        self._settings = self.settings = settings
        self._unloaded = list(DOCKS)
        self._next_view.connect(self._load_next_view, Qt.ConnectionType.QueuedConnection)
        self._last_view.connect(self._on_all_loaded, Qt.ConnectionType.QueuedConnection)
        remember_map(self.page_map, themes.settings)
        self.notices = EngineNotices(self, keeper)
        self.alarms = AlarmWatch(session, themes.settings, self)
        self.alarm_strip = AlarmStrip(self.alarms, session.timeline.go_to, partial(self.focus_view, "bookmarks"))
        self.strips.add(self.alarm_strip)
        self.actions_by_name = Actions(self, themes.settings)
        add_actions(self, self.actions_by_name)
        self.layout_watch = LayoutWatch(self)
        self._zoomed = ZoomedSizes(self, self.docks, themes)
        self.layouts = KeptLayouts(self, self.actions_by_name, self.layout_watch)
        build_menus(self, self.actions_by_name, self.layouts)
        offer_undo(self)
        follow_agreement(self)
        if open_recording is not None:
            offer_recordings(self)
        self.drop_sign = DropSign(self)
        self.playback = self._build_playback()
        self.paused_bar = self._build_paused_bar()
        for strip in (self.banner, self.alarm_strip, self.paused_bar):
            strip.heir = self.page_map.canvas
        self._corner = self._build_corner()
        self._status = StatusBar(session, self, is_own=keeper is not None)
        self.setStatusBar(self._status)
        self._add_view("page_map", self.page_map)
        self._restore_layout()
        themes.changed.connect(self._follow_theme)
        self._apply_theme(themes.theme, self.page_map)
        if session.live_mirror.hello is not None:
            self.show_map()

    def can_link(self, possible: bool) -> None:
        """Whether there is another window whose time may be linked with this one's."""
        self.actions_by_name["link_times"].setEnabled(possible)

    def show_linked(self, words: str) -> None:
        """How this window's time is linked with that of the others; empty: it is not."""
        self.actions_by_name["link_times"].setChecked(bool(words))
        self._status.show_linked(words)

    # Qt's side

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._unloaded:
            self.page_map.canvas.setFocus()
            QTimer.singleShot(_FIRST_VIEW_MS, self, self._load_next_view)

    def changeEvent(self, event: QEvent) -> None:
        """Out of sight nothing was painted: back again, everything is shown as it is now."""
        super().changeEvent(event)
        if event.type() is QEvent.Type.WindowStateChange and not self.isMinimized():
            self.refresher.touch_all()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        accept_drag(event)
        if event.mimeData().hasUrls():
            self.drop_sign.offer(event.mimeData())

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.drop_sign.hide()

    def dropEvent(self, event: QDropEvent) -> None:
        self.drop_sign.hide()
        accept_drag(event)
        open_dropped(self, event.mimeData())

    def closeEvent(self, event: QCloseEvent) -> None:
        layout.save(self, self._settings, self._group, with_docks=self.has_own_docks)
        self.notices.forget()
        self.undo.forget()
        for view in self.views.values():
            self.refresher.remove(view)  # or it would begin again what it ended
            view.remember(self._settings)
            note_widths(view, self.themes.settings)
            view.shut_down()
        self.last_words = "\n".join(view.last_words for view in self.views.values() if view.last_words)
        self.alarms.close()
        self.closing.emit(self)
        super().closeEvent(event)

    # private

    def _build_corner(self) -> Corner:
        actions = self.actions_by_name
        names = ("play", "palette", "theme_toggle", "shortcuts")
        live = None if self.session.timeline.is_file else actions["to_end"]
        corner = Corner(self.session, live, [actions[name] for name in names], self)
        corner.lie_in(self.menuBar())
        return corner

    def _build_playback(self) -> PlaybackBar:
        """Under the page map."""
        names = ("to_start", "frame_back", "play", "frame_forward", "to_end")
        buttons = tuple(self.actions_by_name[name] for name in names)
        bar = PlaybackBar(self.session.timeline, self.session.bookmarks, buttons)
        self.session.status_changed.connect(bar.follow_end)
        self._body.addWidget(bar)
        return bar

    def _build_paused_bar(self) -> PausedBar:
        """Below the other strips: it stays longest."""
        labels = (("Step", "step"), (f"Step {NUM_STEPS}", "step_more"), ("Resume", "resume"))
        bar = PausedBar(self.debugger, tuple((label, self.actions_by_name[name]) for label, name in labels))
        self.strips.add(bar)
        return bar

    def _restore_layout(self) -> None:
        layout.default_size(self)
        self.reset_layout()
        self._has_own_layout = layout.restore(self, self._settings, self._group)
        self.has_own_place = layout.has_place(self._settings, self._group)

    @property
    def _group(self) -> str:
        """Where its layout is remembered."""
        return window_group(window_kind(self.session), self.slot)

    def _keep_sizes(self) -> None:
        """Views bring sizes of their own when they are loaded: the docks take back theirs."""
        if self._has_own_layout:
            layout.restore_docks(self, self._settings, self._group)
        else:
            layout.share_out(self, self.docks)

    def _load_next_view(self) -> None:
        """One view a turn of the event loop, so that the window answers in between."""
        if not self._unloaded:
            return
        spec = self._unloaded.pop(0)
        (self._next_view if self._unloaded else self._last_view).emit()
        self._load(spec)

    def _on_all_loaded(self) -> None:
        self._keep_sizes()
        self.show_what_is_told()
        self.layout_watch.begin()
        self.views_loaded.emit()

    def _load(self, spec: DockSpec) -> None:
        view = spec.view_class()(self.session)
        view.apply_theme(self.themes.theme)
        # Before it was shown it asks for more than it needs: a small window would grow for good.
        view.setMinimumSize(1, 1)
        QTimer.singleShot(1, view, lambda: view.setMinimumSize(0, 0))  # at 0 ms a view that went would be held
        dock = self.docks[spec.name]
        placeholder = dock.widget()
        dock.setWidget(view)
        placeholder.deleteLater()
        self._add_view(spec.name, view)
        if spec.name == "requests" and (table := getattr(view, "table", None)) is not None:
            add_to_requests(table, self.actions_by_name)
        remember_view(view, self.themes.settings)
        self._keep_sizes()
        if spec is DOCKS[0] and not self.session.timeline.is_file:
            view.setFocus()  # the prompt is where one begins

    def _add_view(self, name: str, view: View) -> None:
        self.views[name] = view
        view.recall(self._settings)
        self.refresher.add(view)
        view.done.connect(self.undo.did)

    def _follow_theme(self, theme: Theme) -> None:
        """Views that are not in sight take it after what is was painted."""
        seen = [view for view in self.views.values() if in_sight(view)]
        self._apply_theme(theme, *seen)
        self.refresher.touch_all()
        for view in self.views.values():
            if view not in seen:
                self.themes.afterwards(partial(_apply_late, view, theme))

    def _apply_theme(self, theme: Theme, *views: View) -> None:
        """The window's own parts, and `views`."""
        self.actions_by_name.apply_theme(theme)
        self.actions_by_name[f"theme_{self.themes.choice}"].setChecked(True)
        self.actions_by_name[f"palette_{self.themes.settings.values.palette}"].setChecked(True)
        parts = (
            self._corner,
            self._status,
            self.banner,
            self.alarm_strip,
            self.welcome,
            self.playback,
            self.paused_bar,
        )
        for part in parts:
            part.apply_theme(theme)
        for dock in self.docks.values():
            dock.apply_theme(theme)
        for view in views:
            view.apply_theme(theme)


def _apply_late(view: View, theme: Theme) -> None:
    if shiboken6.isValid(view):  # its window may have closed meanwhile
        view.apply_theme(theme)


def window_kind(session: Session) -> str:
    """Where there is nobody to talk to, a person wants another layout."""
    return "playback" if session.timeline.is_file else "window"
