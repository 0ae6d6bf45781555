"""The main window: the page map in the center, the other views docked around it.

Owns the layout and the connections between session, views and actions. Does not depend on how views paint or how an
engine is run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QSettings, Signal
from PySide6.QtGui import QCloseEvent, QCursor, QDragEnterEvent, QDragLeaveEvent, QDropEvent, QShowEvent

from kvscope_app.alarms.alarm_strip import AlarmStrip
from kvscope_app.alarms.bookmark_actions import make_deletions_undoable
from kvscope_app.debugger.debug_actions import NUM_STEPS, DebugAnswers
from kvscope_app.debugger.paused_bar import PausedBar
from kvscope_app.debugger.selection_menus import add_to_requests
from kvscope_app.engine_launcher.engine_supervisor import EngineSupervisor
from kvscope_app.playback.playback_bar import PlaybackBar
from kvscope_app.recent_recordings.file_drops import DropOverlay, accept_drag, open_dropped
from kvscope_app.recording.recording_actions import recording_menu
from kvscope_app.recording.text_consent import apply_text_consent
from kvscope_app.session.session import Session
from kvscope_app.session_window import NO_OPENERS, Openers
from kvscope_app.setting_names import window_group
from kvscope_app.ui.confirmation import confirm
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.ui.window_size import resize_to_default
from kvscope_app.views.docks import DOCKS
from kvscope_app.views.visibility import is_on_screen
from kvscope_app.window import dock_state
from kvscope_app.window.dock_layouts.dock_lengths import DockLengths
from kvscope_app.window.dock_layouts.layout_undo import LayoutUndo
from kvscope_app.window.dock_layouts.named_layouts import NamedLayouts
from kvscope_app.window.dock_layouts.zoomed_sizes import ZoomedSizes
from kvscope_app.window.engine_notices import EngineNotices
from kvscope_app.window.menu_bar_corner import MenuBarCorner
from kvscope_app.window.status_bar import StatusBar
from kvscope_app.window.view_choices import remember_map
from kvscope_app.window.window_actions import add_actions, build_menus, close_question
from kvscope_app.window.window_body import WindowBody

if TYPE_CHECKING:
    from kvscope_telemetry.source import Update


class MainWindow(WindowBody):
    """Main window of one session. `supervisor` is None unless kvscope started the engine."""

    views_loaded = Signal()
    """Emitted when all docked views are loaded, some time after the first paint."""

    def __init__(
        self,
        session: Session,
        themes: ThemeManager,
        settings: QSettings,
        supervisor: EngineSupervisor | None = None,
        openers: Openers = NO_OPENERS,
        slot: int = 1,
    ) -> None:
        """Create the window. `slot` is its number among the open windows of its kind, from 1; each slot has its own
        geometry.
        """
        super().__init__(session, themes, settings, supervisor, openers)
        self.slot = slot
        self.closing_message = ""
        """Messages that the user must read although the window is closed. Set before `closing` is emitted."""
        remember_map(self.page_map, themes.settings)
        self.notices = EngineNotices(self, supervisor)
        self.alarm_strip = AlarmStrip(self.alarms, session.timeline.go_to, partial(self.focus_view, "bookmarks"))
        self.strips.add(self.alarm_strip)
        add_actions(self, self.actions_by_name, self.notices)
        DebugAnswers(self, self.debugger, self.actions_by_name)
        self.layout_undo = LayoutUndo(self)
        self._dock_lengths = DockLengths(self, self.layout_undo)
        self._zoomed_sizes = ZoomedSizes(self, self.docks, themes)
        self._dock_lengths.edge_moved.connect(self._zoomed_sizes.on_edge_moved)
        self.layouts = NamedLayouts(self, self.actions_by_name, self.layout_undo)
        build_menus(self, self.actions_by_name, self.layouts)
        make_deletions_undoable(self)
        apply_text_consent(self)
        if openers.open_recording is not None:
            for name in ("sample", "recordings"):
                self.welcome.add_offer(self.actions_by_name[name])
            self.setAcceptDrops(True)
        self.drop_overlay = DropOverlay(self)
        self.playback = self._build_playback()
        self.paused_bar = self._build_paused_bar()
        for strip in (self.banner, self.alarm_strip, self.paused_bar):
            strip.focus_heir = self.page_map.canvas
        self._menu_bar_corner = self._build_corner()
        self.status_bar = StatusBar(session, self, is_own=supervisor is not None)
        self.setStatusBar(self.status_bar)
        self.status_bar.recording_clicked.connect(lambda: recording_menu(self).popup(QCursor.pos()))
        self.docked.add_view("page_map", self.page_map)
        self._accepts_prompts, self._is_console_auto_closed = True, False
        """`_accepts_prompts`: whether the engine accepts prompts, True while unknown.

        `_is_console_auto_closed`: whether the window rather than the user closed the console.
        """
        self._has_own_layout, self.has_saved_geometry = self._restore_layout()
        self._connect_refreshes()
        self._apply_theme_to_parts(themes.theme)
        self.page_map.apply_theme(themes.theme)
        if session.live_mirror.hello is not None:
            self.show_map()
            self._update_console()

    def reset_layout(self) -> None:
        super().reset_layout()
        self._auto_close_console()

    # Qt events

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self.docked.begin():
            self.page_map.canvas.setFocus()

    def changeEvent(self, event: QEvent) -> None:
        """Refresh all views after the window was minimized, because they did not paint meanwhile."""
        super().changeEvent(event)
        if event.type() is QEvent.Type.WindowStateChange and not self.isMinimized():
            self.refresher.touch_all()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        accept_drag(event)
        if event.mimeData().hasUrls():
            self.drop_overlay.explain_drop(event.mimeData())

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.drop_overlay.hide()

    def dropEvent(self, event: QDropEvent) -> None:
        self.drop_overlay.hide()
        accept_drag(event)
        open_dropped(self, event.mimeData())

    def closeEvent(self, event: QCloseEvent) -> None:
        # Spontaneous: closed through the window's frame. Our actions have asked already; a signal must not ask.
        question = close_question(self) if event.spontaneous() else ""
        if question:
            event.ignore()
            confirm(self, question, "Close window", self.close)
            return
        if self._is_console_auto_closed:  # the next engine may accept prompts
            self.docks["console"].show()
        dock_state.save(self, self.settings, self._settings_group, with_docks=self.has_own_docks)
        if self.has_own_docks:
            self._dock_lengths.save(self.settings, self._settings_group)
        self.notices.detach()
        self.undo.forget()
        self.closing_message = self.docked.close()
        self.alarms.close()
        self.closing.emit(self)
        super().closeEvent(event)

    # private

    def _connect_refreshes(self) -> None:
        session, timeline = self.session, self.session.timeline
        for signal in (
            *(session.status_changed, timeline.paused_changed, timeline.epoch_changed, session.selection.changed),
            *(timeline.loop.changed, session.bookmarks.changed, self.undo.indexChanged, self.debugger.answered),
            *(self.page_map.mode_changed, self.link_changed, timeline.shared_zoom.changed),
        ):
            signal.connect(self.actions_by_name.refresh)
        timeline.updated.connect(self._on_update)
        self.link_changed.connect(self._on_link)
        self.themes.changed.connect(self._on_theme_changed)
        self.docked.loaded.connect(self._on_loaded)
        self.docked.all_loaded.connect(self._on_all_loaded)

    def _on_update(self, update: Update) -> None:
        if update.snapshot is not None:  # the engine's capabilities are known now
            self.actions_by_name.refresh()
            self._update_console()

    def _update_console(self) -> None:
        session = self.session
        if session.timeline.is_file or session.live_mirror.hello is None:
            return
        if session.accepts_prompts != self._accepts_prompts:
            self._accepts_prompts = session.accepts_prompts
            self._auto_close_console()
            self.layout_undo.accept_change()

    def _auto_close_console(self) -> None:
        """Close the console if the engine accepts no prompts; reopen it if it does, unless the user closed it."""
        console = self.docks["console"]
        if not self._accepts_prompts:
            self._is_console_auto_closed |= not console.isHidden()
            console.hide()
        elif self._is_console_auto_closed:
            self._is_console_auto_closed = False
            console.show()

    def _on_link(self) -> None:
        self.status_bar.show_link_text(self.link_text)

    def _build_corner(self) -> MenuBarCorner:
        actions = self.actions_by_name
        is_file = self.session.timeline.is_file
        names = ("play", *(() if is_file else ("record",)), "palette", "theme_toggle", "shortcuts")
        live = None if is_file else actions["to_end"]
        corner = MenuBarCorner(self.session, live, [actions[name] for name in names], self)
        corner.attach_to(self.menuBar())
        return corner

    def _build_playback(self) -> PlaybackBar:
        names = ("to_start", "frame_back", "play", "frame_forward", "to_end")
        buttons = tuple(self.actions_by_name[name] for name in names)
        bar = PlaybackBar(self.session.timeline, self.session.bookmarks, buttons)
        self.session.status_changed.connect(bar.follow_end)
        self.add_below(bar)
        return bar

    def _build_paused_bar(self) -> PausedBar:
        """Create the bar that shows that the engine is paused. It is below the other strips because it is shown
        longest.
        """
        labels = (("Step", "step"), (f"Step {NUM_STEPS}", "step_more"), ("Resume", "resume"))
        bar = PausedBar(self.debugger, tuple((label, self.actions_by_name[name]) for label, name in labels))
        self.strips.add(bar)
        return bar

    def _restore_layout(self) -> tuple[bool, bool]:
        """Arrange the window by default, then restore the saved layout and geometry, if any. Returns whether a layout
        was restored, and whether a geometry is saved.
        """
        resize_to_default(self)
        self.reset_layout()
        self._dock_lengths.restore(self.settings, self._settings_group)
        return dock_state.restore(self, self.settings, self._settings_group), dock_state.has_geometry(
            self.settings, self._settings_group
        )

    @property
    def _settings_group(self) -> str:
        return window_group(window_kind(self.session), self.slot)

    def _restore_sizes(self) -> None:
        """Restore the dock sizes, because a loaded view changes the size hints of its dock."""
        if self._has_own_layout:
            dock_state.restore_docks(self, self.settings, self._settings_group)
        else:
            dock_state.apply_default_sizes(self, self.docks)
        self._auto_close_console()

    def _on_loaded(self, name: str) -> None:
        view = self.views[name]
        if name == "requests" and (table := getattr(view, "table", None)) is not None:
            add_to_requests(table, self.actions_by_name)
        if is_on_screen(view):  # views behind a tab wait until all are loaded: this takes 10 ms
            self._restore_sizes()
        if name == DOCKS[0].name and not self.session.timeline.is_file:
            view.setFocus()  # the user starts by typing a prompt

    def _on_all_loaded(self) -> None:
        self._restore_sizes()
        self.show_capabilities()
        self.layout_undo.record_state()
        self.views_loaded.emit()

    def _on_theme_changed(self, theme: Theme) -> None:
        self.actions_by_name.refresh()
        self._apply_theme_to_parts(theme)
        self.docked.apply_theme(theme)
        self.refresher.touch_all()

    def _apply_theme_to_parts(self, theme: Theme) -> None:
        parts = (
            *(self.actions_by_name, self._menu_bar_corner, self.status_bar, self.banner, self.alarm_strip),
            *(self.welcome, self.playback, self.paused_bar),
        )
        for part in parts:
            part.apply_theme(theme)


def window_kind(session: Session) -> str:
    """Return the kind of the window, `window` or `playback`. The kinds have separate layouts."""
    return "playback" if session.timeline.is_file else "window"
