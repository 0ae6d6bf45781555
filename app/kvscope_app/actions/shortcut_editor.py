"""Dialog to change shortcuts. A key that another action has is reassigned only when Set is pressed a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QKeySequence
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHBoxLayout,
    QHeaderView,
    QKeySequenceEdit,
    QLineEdit,
    QPushButton,
    QTreeWidget,
    QTreeWidgetItem,
    QWidget,
)

from kvscope_app.actions.action_registry import Actions
from kvscope_app.actions.keymap import Command, UserShortcuts, conflicts, keys_of, with_keys
from kvscope_app.settings.settings_store import SettingsStore
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.widget_factories import label

_NAME = Qt.ItemDataRole.UserRole
_HINT = "Select a command, press its new shortcut, then Set."


class ShortcutEditor(Sheet):
    """Editor for the shortcuts of `actions`. Changes are saved in `settings_store` and apply immediately in all
    windows.
    """

    def __init__(self, parent: QWidget, actions: Actions, settings_store: SettingsStore, accent: QColor) -> None:
        super().__init__("Change shortcuts", parent)
        self._actions, self._settings_store, self._accent = actions, settings_store, accent
        self._unconfirmed: tuple[str, str] | None = None
        """(command, key) of the conflict that is shown, or None. Pressing Set again reassigns the key."""
        self.search = QLineEdit()
        self.search.setPlaceholderText("Find a command or a key")
        self.search.setAccessibleName("Find a command or a key")
        self.search.setClearButtonEnabled(True)
        self.command_list = QTreeWidget()
        self.keys = QKeySequenceEdit()
        self.keys.setMaximumSequenceLength(1)
        self.keys.setAccessibleName("New shortcut")
        self.hint = label(_HINT, "muted", wraps=True)
        self.set_button, self.clear_button, self.default_button = (
            QPushButton(text) for text in ("Set", "Clear", "Default")
        )
        self.reset_button = QPushButton("Reset all")
        self._set_up_list()
        self._lay_out()
        self._connect()
        self._fill()
        self.resize(620, 640)

    def select_command(self, name: str) -> None:
        for item in self._items():
            if item.data(0, _NAME) == name:
                self.command_list.setCurrentItem(item)

    @property
    def _command(self) -> Command | None:
        item = self.command_list.currentItem()
        name = "" if item is None else item.data(0, _NAME)
        return next((command for command in self._actions.commands() if command.name == name), None)

    def _on_set(self) -> None:
        command, keys = self._command, self.keys.keySequence().toString()
        if command is None or not keys:
            self.hint.setText(_HINT)
            return
        others = conflicts(command, (keys,), self._actions.commands(), self._settings_store.values.shortcuts)
        if others and self._unconfirmed != (command.name, keys):
            self._unconfirmed = (command.name, keys)
            names = " and ".join(f"“{other.text.rstrip('…')}”" for other in others)
            self.hint.setText(f"{_native(keys)} is assigned to {names}. Press Set again to reassign it.")
            return
        self._change(command, lambda commands, shortcuts: with_keys(command, (keys,), commands, shortcuts))
        self.hint.setText(f"{_native(keys)} is now “{command.text.rstrip('…')}”.")

    def _on_clear(self) -> None:
        if (command := self._command) is not None:
            self._change(command, lambda commands, shortcuts: with_keys(command, (), commands, shortcuts))

    def _on_default(self) -> None:
        if (command := self._command) is not None:
            self._change(command, lambda commands, shortcuts: with_keys(command, command.own_keys, commands, shortcuts))

    def _change(self, command: Command, compute: Callable[[list[Command], UserShortcuts], UserShortcuts]) -> None:
        commands = self._actions.commands()
        self._settings_store.change_by(lambda settings: {"shortcuts": compute(commands, settings.shortcuts)})
        self._unconfirmed = None
        self.keys.clear()
        self.hint.setText(_HINT)
        self.select_command(command.name)

    def _on_item_changed(self) -> None:
        command = self._command
        self._unconfirmed = None
        self.keys.clear()
        for button in (self.set_button, self.clear_button, self.default_button):
            button.setEnabled(command is not None)

    def _fill(self) -> None:
        shortcuts = self._settings_store.values.shortcuts
        current = self._command
        self.command_list.clear()
        for spec, command in zip(self._actions, self._actions.commands(), strict=True):
            keys = keys_of(command.name, command.own_keys, shortcuts)
            text = ", ".join(_native(key) for key in keys)
            location = f"{spec.group}, when it has the focus" if command.focus_dock else spec.group
            item = QTreeWidgetItem([command.text.rstrip("…"), text, location])
            item.setData(0, _NAME, command.name)
            if command.name in shortcuts:
                item.setForeground(1, self._accent)
                default_keys = ", ".join(_native(key) for key in command.own_keys) or "none"
                item.setToolTip(1, f"Changed; its own: {default_keys}")
            self.command_list.addTopLevelItem(item)
        if current is not None:
            self.select_command(current.name)
        self._filter(self.search.text())
        self.reset_button.setEnabled(bool(shortcuts))

    def _filter(self, text: str) -> None:
        folded_text = text.casefold().strip()
        for item in self._items():
            item.setHidden(not any(folded_text in item.text(column).casefold() for column in range(3)))

    def _items(self) -> list[QTreeWidgetItem]:
        items = (self.command_list.topLevelItem(index) for index in range(self.command_list.topLevelItemCount()))
        return [item for item in items if item is not None]

    def _set_up_list(self) -> None:
        self.command_list.setAccessibleName("Commands and shortcuts")
        self.command_list.setHeaderLabels(["Command", "Keys", "Menu"])
        self.command_list.setRootIsDecorated(False)
        self.command_list.setUniformRowHeights(True)
        self.command_list.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.command_list.header().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.command_list.header().setSectionResizeMode(1, QHeaderView.ResizeMode.ResizeToContents)
        self.command_list.header().setSectionResizeMode(2, QHeaderView.ResizeMode.ResizeToContents)
        self.command_list.header().setStretchLastSection(False)

    def _lay_out(self) -> None:
        row = QHBoxLayout()
        row.addWidget(self.keys, 1)
        for button in (self.set_button, self.clear_button, self.default_button, self.reset_button):
            button.setAutoDefault(False)  # Enter can be assigned like any other key
            row.addWidget(button)
        self.column.addWidget(self.search)
        self.column.addWidget(self.command_list, 1)
        self.column.addWidget(self.hint)
        self.column.addLayout(row)
        self._on_item_changed()

    def _connect(self) -> None:
        self.search.textChanged.connect(self._filter)
        self.command_list.currentItemChanged.connect(lambda *_: self._on_item_changed())
        self.set_button.clicked.connect(self._on_set)
        self.clear_button.clicked.connect(self._on_clear)
        self.default_button.clicked.connect(self._on_default)
        self.reset_button.clicked.connect(partial(self._settings_store.change, shortcuts={}))
        self._actions.keys_changed.connect(self._fill)


def _native(keys: str) -> str:
    return QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)
