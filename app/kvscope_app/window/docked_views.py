"""Docks of a window and their views. Docks exist from the start; views are loaded after the first paint.

Owns docks and views, from loading a view to closing it. Does not depend on the arrangement of the docks or the actions
of the window.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import shiboken6
from PySide6.QtCore import QObject, QSettings, Qt, QTimer, Signal
from PySide6.QtWidgets import QApplication, QMainWindow

from kvscope_app.ui.widget_factories import label_boxes
from kvscope_app.views.docks import DOCKS, DockSpec
from kvscope_app.views.visibility import is_on_screen
from kvscope_app.window.dock import Dock
from kvscope_app.window.tab_stops import focus_next
from kvscope_app.window.view_choices import remember_view, save_widths

if TYPE_CHECKING:
    from kvscope_app.actions.undo_stack import UndoStack
    from kvscope_app.session.session import Session
    from kvscope_app.ui.theme import Theme
    from kvscope_app.ui.theming.theme_manager import ThemeManager
    from kvscope_app.views.base import View
    from kvscope_app.views.refresher import Refresher

_FIRST_VIEW_MS: Final = 40
"""Delay in ms from showing the window to loading the first view, so that the window paints first."""


class DockedViews(QObject):
    """Docks and views of one window. `refresher` refreshes the views. Changes in views that the user can undo
    are pushed to `undo`.
    """

    loaded = Signal(str)
    """Emitted with the name of a view after it was put into its dock."""
    all_loaded = Signal()
    _next_view = Signal()
    _last_view = Signal()
    """Signal from this object to itself, like `_next_view`. Both are queued and delivered in the next turn of the event
    loop.

    A `QTimer.singleShot` of 0 ms is not used, because its callback is never released if the window closes first.
    """

    def __init__(
        self,
        window: QMainWindow,
        session: Session,
        themes: ThemeManager,
        settings: QSettings,
        refresher: Refresher,
        undo: UndoStack,
    ) -> None:
        super().__init__(window)
        self._session, self._themes, self._settings = session, themes, settings
        self._refresher, self._undo = refresher, undo
        self.views: dict[str, View] = {}
        """Loaded views, and those passed to `add_view`, by name."""
        self.docks = {spec.name: Dock(spec.title, spec.name, window) for spec in DOCKS}
        for name, dock in self.docks.items():
            dock.apply_theme(themes.theme)
            dock.visibilityChanged.connect(partial(self._on_dock_visible, name))
        self._unloaded = list(DOCKS)
        self._next_view.connect(self._load_next, Qt.ConnectionType.QueuedConnection)
        self._last_view.connect(self.all_loaded, Qt.ConnectionType.QueuedConnection)

    def begin(self) -> bool:
        """Start loading views, one per turn of the event loop so that the window stays responsive.

        Call it once the window is shown. Returns False if no view is left to load.
        """
        if self._unloaded:
            QTimer.singleShot(_FIRST_VIEW_MS, self, self._load_next)
        return bool(self._unloaded)

    def add_view(self, name: str, view: View) -> None:
        self.views[name] = view
        label_boxes(view)
        view.restore_settings(self._settings)
        self._refresher.add_view(view)
        view.done.connect(self._undo.push_done)
        view.view_requested.connect(self.focus)

    def focus(self, name: str) -> None:
        """Raise a dock and focus its view, or the next Tab stop if the view has nothing visible to focus."""
        dock = self.docks[name]
        dock.show()
        dock.raise_()
        if name in self.views:
            self.views[name].setFocus(Qt.FocusReason.ShortcutFocusReason)
            focus = QApplication.focusWidget()
            if focus is not None and not focus.isVisible():  # Qt gives the focus to hidden widgets too
                focus_next(dock.window(), forward=True)

    def apply_theme(self, theme: Theme) -> None:
        """Apply the theme immediately to docks and visible views, and to hidden views after the visible ones were
        painted.
        """
        for dock in self.docks.values():
            dock.apply_theme(theme)
        for view in self.views.values():
            if is_on_screen(view):
                view.apply_theme(theme)
            else:
                self._themes.call_later(partial(_apply_late, view, theme))

    def close(self) -> str:
        """Stop loading views, save the user's choices in the loaded views, and close them.

        Returns messages that the user must still read although the views are closed.
        """
        self._unloaded.clear()
        for view in self.views.values():
            self._refresher.remove(view)  # or a refresh would restart what `shut_down` ends
            view.save_settings(self._settings)
            save_widths(view, self._themes.settings)
            view.shut_down()
        return "\n".join(view.closing_message for view in self.views.values() if view.closing_message)

    def _load_next(self) -> None:
        if not self._unloaded:
            return
        spec = self._unloaded.pop(0)
        (self._next_view if self._unloaded else self._last_view).emit()
        self._load(spec)

    def _load(self, spec: DockSpec) -> None:
        view = spec.view_class()(self._session)
        view.apply_theme(self._themes.theme)
        # Before it is shown, a view requests more than it needs: a small window would grow permanently.
        view.setMinimumSize(1, 1)
        QTimer.singleShot(1, view, lambda: view.setMinimumSize(0, 0))  # 0 ms would keep a deleted view alive
        dock = self.docks[spec.name]
        placeholder = dock.widget()
        dock.setWidget(view)
        placeholder.deleteLater()
        self.add_view(spec.name, view)
        remember_view(view, self._themes.settings)
        self.loaded.emit(spec.name)

    def _on_dock_visible(self, name: str, is_visible: bool) -> None:
        if is_visible and name in self.views:
            self._themes.finish()
            self.views[name].became_visible()
            self._refresher.touch(self.views[name])
        elif not is_visible:
            self.move_focus_out_of_hidden_dock()

    def move_focus_out_of_hidden_dock(self) -> None:
        """Move the keyboard focus out of a hidden dock, where shortcuts would act invisibly.

        Deferred to the next turn of the event loop, because the caller may be inside `restoreState`.
        """
        QTimer.singleShot(1, self, self._move_focus_out_of_hidden_dock)

    def _move_focus_out_of_hidden_dock(self) -> None:
        focus = QApplication.focusWidget()
        dock = next((each for each in self.docks.values() if focus is not None and each.isAncestorOf(focus)), None)
        if focus is None or dock is None or is_on_screen(dock):
            return
        window = self.parent()
        assert isinstance(window, QMainWindow), "it was given at the start"
        visible_tabs = [each for each in window.tabifiedDockWidgets(dock) if is_on_screen(each)]
        (visible_tabs[0].widget() if visible_tabs else self.views["page_map"]).setFocus(Qt.FocusReason.OtherFocusReason)
        if focus.hasFocus():  # the other view has no visible widget that accepts focus
            focus.clearFocus()


def _apply_late(view: View, theme: Theme) -> None:
    if shiboken6.isValid(view):  # the window may have been closed meanwhile
        view.apply_theme(theme)
