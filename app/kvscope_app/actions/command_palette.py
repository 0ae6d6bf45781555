"""Command palette: search and run any action of the window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt
from PySide6.QtGui import QAction, QKeyEvent, QKeySequence, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLineEdit, QListWidget, QListWidgetItem, QVBoxLayout, QWidget

from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.zoom import scaled

_WIDTH: Final = 560
_ROW_HEIGHT: Final = 34
_MAX_ROWS: Final = 11
NOTHING_FOUND: Final = "No matching command"


class CommandPalette(QFrame):
    """Popup over `parent` that closes when it loses the focus."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setProperty("look", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._window = parent
        self._entries: list[tuple[str, QAction]] = []
        self._search, self._list = QLineEdit(), QListWidget()
        self._search.setPlaceholderText("Type a command")
        self._search.setAccessibleName("Command")
        self._search.setClearButtonEnabled(True)
        self._list.setProperty("look", "palette")
        self._list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 8, 8, 8)
        column.addWidget(self._search)
        column.addWidget(self._list)
        self._search.textChanged.connect(self._filter)
        self._search.installEventFilter(self)
        self._list.itemClicked.connect(lambda _: self._run())

    def open_with(self, entries: Iterable[tuple[str, QAction]]) -> None:
        """Show the palette with these (group, action) entries. Disabled actions are left out."""
        self._entries = [(group, action) for group, action in entries if action.isEnabled()]
        self._search.clear()
        self._filter("")
        window = self._window
        self.setFixedWidth(min(scaled(_WIDTH), max(240, window.width() - 40)))
        self.move(window.mapToGlobal(QPoint((window.width() - self.width()) // 2, min(90, window.height() // 6))))
        self.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._search.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._search and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            step = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1}.get(Qt.Key(event.key()))
            if step is not None and self._list.currentItem() is not None:
                self._list.setCurrentRow((self._list.currentRow() + step) % self._list.count())
                return True
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._run()
                return True
        return super().eventFilter(watched, event)

    def _filter(self, text: str) -> None:
        self._list.clear()
        ranked = ((match_rank(text, action_text(action), group), group, action) for group, action in self._entries)
        matches = [(rank, group, action) for rank, group, action in ranked if rank is not None]
        for _, group, action in sorted(matches, key=lambda entry: entry[0]):
            self._add_row(group, action)
        if not matches:
            self._show_message(NOTHING_FOUND)
        self._list.setCurrentRow(0 if matches else -1)
        self._list.setFixedHeight(scaled(_ROW_HEIGHT) * min(_MAX_ROWS, max(1, self._list.count())) + 4)
        self.adjustSize()

    def _show_message(self, text: str) -> None:
        item = QListWidgetItem(text, self._list)
        item.setFlags(Qt.ItemFlag.NoItemFlags)
        item.setSizeHint(QSize(0, scaled(_ROW_HEIGHT)))

    def _add_row(self, group: str, action: QAction) -> None:
        item = QListWidgetItem(self._list)
        item.setData(Qt.ItemDataRole.UserRole, action)
        item.setData(Qt.ItemDataRole.AccessibleTextRole, action_text(action))
        row = QWidget()
        layout = QHBoxLayout(row)
        layout.setContentsMargins(8, 0, 8, 0)
        name_label, group_label = PlainLabel(action_text(action)), PlainLabel(f"{group}{_state_text(action)}")
        group_label.setProperty("look", "muted")
        layout.addWidget(name_label)
        layout.addWidget(group_label)
        layout.addStretch()
        if keys := action.shortcut().toString(QKeySequence.SequenceFormat.NativeText):
            key_label = PlainLabel(keys)
            key_label.setProperty("look", "key")
            layout.addWidget(key_label)
        hint = row.sizeHint()
        hint.setHeight(scaled(_ROW_HEIGHT))
        item.setSizeHint(hint)
        self._list.setItemWidget(item, row)

    def _run(self) -> None:
        item = self._list.currentItem()
        if item is None:
            return
        action = item.data(Qt.ItemDataRole.UserRole)
        self.close()
        if isinstance(action, QAction):
            action.trigger()


def action_text(action: QAction) -> str:
    """Return the action's text without mnemonics (`&`)."""
    return action.text().replace("&", "")


def _state_text(action: QAction) -> str:
    """Return a suffix with the check state of a checkable action. In an exclusive group, only the checked
    action gets a suffix.
    """
    if not action.isCheckable() or (action.actionGroup() is not None and not action.isChecked()):
        return ""
    return "  ·  on" if action.isChecked() else "  ·  off"


def match_rank(typed: str, text: str, group: str) -> tuple[int, int] | None:
    """Return the rank of an action for the `typed` text (the smallest rank is listed first), or None if it does not
    match.

    Order: the whole text, the start of a word, a substring, the group's name, then all typed letters in order.
    """
    typed, folded_text = typed.casefold().strip(), text.casefold()
    if not typed:
        return (0, 0)
    if folded_text.rstrip("…") == typed.rstrip("…"):
        return (0, 0)
    if any(word.startswith(typed) for word in folded_text.split()) or folded_text.startswith(typed):
        return (1, not folded_text.startswith(typed))  # ties keep the registry's order
    if typed in folded_text:
        return (2, folded_text.index(typed))
    if typed in group.casefold():
        return (3, len(folded_text))
    letters = iter(folded_text)
    return (4, len(folded_text)) if all(letter in letters for letter in typed if letter != " ") else None
