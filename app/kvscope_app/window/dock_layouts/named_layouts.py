"""Saves, applies and deletes named layouts, which all windows share, and layout files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QInputDialog, QMenu

from kvscope_app.actions.action_registry import Actions, ActionSpec
from kvscope_app.settings.layout_value import WindowLayout, read_layout, write_layout
from kvscope_app.settings.settings import Settings
from kvscope_app.ui.file_dialogs import ask_open, ask_save
from kvscope_app.window.dock_layouts.arrangement import KNOWN_NAMES, layout_of, show_layout
from kvscope_app.window.dock_layouts.layout_undo import LayoutUndo
from kvscope_app.window.view_choices import apply_choices, choices_of
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.errors import BadInput

LAYOUTS: Final = "Layouts"
FILES: Final = "Layouts (*.json);;All files (*)"
_MAX_NAME: Final = 60
_NOTICE_MS: Final = 6000


class NamedLayouts(QObject):
    """Layout actions (save, open, delete, reset) and one action per named layout, in `actions` and in `menu`."""

    def __init__(self, window: WindowBody, actions: Actions, layout_undo: LayoutUndo) -> None:
        super().__init__(window)
        self._window, self._actions, self._layout_undo = window, actions, layout_undo
        self._settings_store = window.themes.settings
        self.menu: QMenu | None = None
        self._names: list[str] = []
        for spec in (
            ActionSpec("save_layout", "Save layout as…", LAYOUTS, self._ask_name),
            ActionSpec("export_layout", "Save layout to file…", LAYOUTS, self._ask_export_path),
            ActionSpec("open_layout", "Open layout…", LAYOUTS, self._ask_file),
            ActionSpec(
                "forget_layout",
                "Delete layout…",
                LAYOUTS,
                self._ask_layout_to_delete,
                enabled=lambda: bool(self._names),
            ),
            ActionSpec("reset_layout", "Reset to default layout", LAYOUTS, self._reset, (), "layout"),
        ):
            actions.add_action(spec)
        self._sync_actions()
        self._settings_store.changed.connect(self._on_settings)

    def fill(self, menu: QMenu) -> None:
        """Add all layout actions to `menu`, and update the entries of named layouts when those change."""
        self.menu = menu
        for spec in self._actions.in_group(LAYOUTS):
            menu.addAction(self._actions[spec.name])

    def save(self, name: str) -> None:
        """Save the present layout as `name`. Overwriting can be undone."""
        name = name.strip()[:_MAX_NAME]
        if not name:
            return
        layout = layout_of(self._window)
        old = self._settings_store.values.layouts.get(name)
        self._store(name, layout)
        if old is not None:
            self._window.undo.push_done(
                f"overwriting the layout “{name}”", partial(self._store, name, old), partial(self._store, name, layout)
            )
        self._window.statusBar().showMessage(f"Layout saved as “{name}”", _NOTICE_MS)

    def delete(self, name: str) -> None:
        old = self._settings_store.values.layouts.get(name)
        if old is not None:
            self._store(name, None)
            self._window.undo.push_done(
                f"deleting the layout “{name}”", partial(self._store, name, old), partial(self._store, name, None)
            )

    def show(self, name: str) -> None:
        layout = self._settings_store.values.layouts.get(name)
        if layout is None:
            return
        try:
            self.apply(layout, f"applying the layout “{name}”")
        except BadInput as error:
            self._window.banner.show_message(f"The layout “{name}” cannot be used", str(error), is_temporary=True)

    def apply(self, layout: WindowLayout, text: str) -> None:
        """Apply `layout`. `text` describes the change for Undo. Raises BadInput, and changes nothing, for an unknown
        name.
        """
        layout.check(KNOWN_NAMES)
        views = self._window.views
        before = partial(apply_choices, views, choices_of(views))
        self._layout_undo.announce_replacement(text, before, partial(apply_choices, views, layout.choices))
        show_layout(self._window, layout)

    def write(self, path: str) -> None:
        try:
            write_layout(path, layout_of(self._window))
        except BadInput as error:
            self._window.banner.show_message("The layout could not be saved", str(error), is_temporary=True)
            return
        self._window.statusBar().showMessage(f"Layout saved to {path}", _NOTICE_MS)

    def read(self, path: str) -> None:
        """Apply the layout in a file. If the file cannot be used, report this in the banner and change nothing."""
        try:
            self.apply(read_layout(path, KNOWN_NAMES), f"opening the layout {Path(path).name}")
        except BadInput as error:
            self._window.banner.show_message("The layout cannot be opened", str(error), is_temporary=True)

    def _reset(self) -> None:
        self._layout_undo.announce_replacement("resetting the layout")
        self._window.reset_layout()

    def _store(self, name: str, layout: WindowLayout | None) -> None:
        def change(settings: Settings) -> dict[str, object]:
            others = {key: value for key, value in settings.layouts.items() if key != name}
            return {"layouts": others if layout is None else {**others, name: layout}}

        self._settings_store.change_by(change)

    def _on_settings(self, before: Settings) -> None:
        if list(before.layouts) != list(self._settings_store.values.layouts):
            self._sync_actions()

    def _sync_actions(self) -> None:
        names = sorted(self._settings_store.values.layouts, key=str.casefold)
        for name in self._names:
            self._actions.remove(f"layout_{name}")
        for name in names:
            text = name.replace("&", "&&")
            spec = ActionSpec(f"layout_{name}", f"Layout: {text}", LAYOUTS, partial(self.show, name))
            action = self._actions.add_action(spec)
            if self.menu is not None:
                self.menu.addAction(action)
        self._names = names
        self._actions.refresh()

    def _ask_export_path(self) -> None:
        ask_save(self._window, "Save layout", Path("kvscope-layout.json"), FILES, self.write)

    def _ask_file(self) -> None:
        ask_open(self._window, "Open layout", "", FILES, self.read)

    def _ask_name(self) -> None:
        dialog = self._dialog("Save layout", "Name (replaces a layout of the same name):")
        dialog.setTextValue(f"Layout {len(self._names) + 1}")
        dialog.textValueSelected.connect(self.save)
        dialog.open()

    def _ask_layout_to_delete(self) -> None:
        if self._names:
            dialog = self._dialog("Delete layout", "Layout:")
            dialog.setComboBoxItems(self._names)
            dialog.textValueSelected.connect(self.delete)
            dialog.open()

    def _dialog(self, title: str, text: str) -> QInputDialog:
        dialog = QInputDialog(self._window)
        dialog.setWindowTitle(title)
        dialog.setLabelText(text)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        return dialog
