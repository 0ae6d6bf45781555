"""Layouts under names: keep the present one, go back to one, forget one. They are the same in all windows."""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtCore import QByteArray, QObject, Qt
from PySide6.QtWidgets import QInputDialog, QMenu

from kvscope_app.setting_names import LAYOUT_VERSION
from kvscope_app.settings.settings import KeptLayout, Settings
from kvscope_app.window.actions import Actions, ActionSpec
from kvscope_app.window.arranging.layout_watch import LayoutWatch
from kvscope_app.window.window_body import WindowBody

LAYOUTS: Final = "Layouts"
_MAX_NAME: Final = 60
_NOTICE_MS: Final = 6000


class KeptLayouts(QObject):
    """An action for each name, in `actions` and in `menu`, as names come and go."""

    def __init__(self, window: WindowBody, actions: Actions, watch: LayoutWatch) -> None:
        super().__init__(window)
        self._window, self._actions, self._watch = window, actions, watch
        self._choices = window.themes.settings
        self._menu: QMenu | None = None
        self._names: list[str] = []
        for spec in (
            ActionSpec("save_layout", "Save this layout as…", LAYOUTS, self._ask_name),
            ActionSpec("forget_layout", "Forget a layout…", LAYOUTS, self._ask_which),
            ActionSpec("reset_layout", "Reset to default layout", LAYOUTS, self._reset, (), "layout"),
        ):
            actions.add(spec)
        self._follow()
        self._choices.changed.connect(self._on_settings)

    def fill(self, menu: QMenu) -> None:
        """Keep the entries of `menu` up to date from now on."""
        self._menu = menu
        for spec in self._actions.in_group(LAYOUTS):
            menu.addAction(self._actions[spec.name])

    def save(self, name: str) -> None:
        """The layout of now gets this name; one that had it is taken back by an undo."""
        name = name.strip()[:_MAX_NAME]
        if not name:
            return
        fresh = KeptLayout(bytes(self._window.saveState(LAYOUT_VERSION).data()), LAYOUT_VERSION)
        old = self._choices.values.layouts.get(name)
        self._put(name, fresh)
        if old is not None:
            self._window.undo.did(
                f"saving the layout “{name}” anew", partial(self._put, name, old), partial(self._put, name, fresh)
            )
        self._window.statusBar().showMessage(f"The layout is kept as “{name}”", _NOTICE_MS)

    def forget(self, name: str) -> None:
        """This name is no layout any more."""
        old = self._choices.values.layouts.get(name)
        if old is not None:
            self._put(name, None)
            self._window.undo.did(
                f"forgetting the layout “{name}”", partial(self._put, name, old), partial(self._put, name, None)
            )

    def show(self, name: str) -> None:
        """Put the docks where they are in this one."""
        kept = self._choices.values.layouts.get(name)
        if kept is None:
            return
        self._watch.about_to(f"going to the layout “{name}”")
        if not self._window.restoreState(QByteArray(kept.state), kept.version):
            self._window.statusBar().showMessage(f"The layout “{name}” is of another version of kvscope", _NOTICE_MS)

    def _reset(self) -> None:
        self._watch.about_to("resetting the layout")
        self._window.reset_layout()

    def _put(self, name: str, layout: KeptLayout | None) -> None:
        def change(now: Settings) -> dict[str, object]:
            others = {key: value for key, value in now.layouts.items() if key != name}
            return {"layouts": others if layout is None else {**others, name: layout}}

        self._choices.change_by(change)

    def _on_settings(self, before: Settings) -> None:
        if list(before.layouts) != list(self._choices.values.layouts):
            self._follow()

    def _follow(self) -> None:
        wanted = sorted(self._choices.values.layouts, key=str.casefold)
        for name in self._names:
            self._actions.remove(f"layout_{name}")
        for name in wanted:
            words = name.replace("&", "&&")
            spec = ActionSpec(f"layout_{name}", f"Layout: {words}", LAYOUTS, partial(self.show, name))
            action = self._actions.add(spec)
            if self._menu is not None:
                self._menu.addAction(action)
        self._names = wanted
        self._actions["forget_layout"].setEnabled(bool(wanted))

    def _ask_name(self) -> None:
        dialog = self._dialog("Save this layout", "Name (a layout that has it already is replaced):")
        dialog.setTextValue(f"Layout {len(self._names) + 1}")
        dialog.textValueSelected.connect(self.save)
        dialog.open()

    def _ask_which(self) -> None:
        if self._names:
            dialog = self._dialog("Forget a layout", "Layout to forget:")
            dialog.setComboBoxItems(self._names)
            dialog.textValueSelected.connect(self.forget)
            dialog.open()

    def _dialog(self, title: str, words: str) -> QInputDialog:
        dialog = QInputDialog(self._window)
        dialog.setWindowTitle(title)
        dialog.setLabelText(words)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        return dialog
