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
_ROW: Final = 34
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
        self._line, self._list = QLineEdit(), QListWidget()
        self._line.setPlaceholderText("Type a command")
        self._line.setAccessibleName("Command")
        self._line.setClearButtonEnabled(True)
        self._list.setProperty("look", "palette")
        self._list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 8, 8, 8)
        column.addWidget(self._line)
        column.addWidget(self._list)
        self._line.textChanged.connect(self._filter)
        self._line.installEventFilter(self)
        self._list.itemClicked.connect(lambda _: self._run())

    def open_with(self, entries: Iterable[tuple[str, QAction]]) -> None:
        """Show the palette with these (group, action) entries. Disabled actions are left out."""
        self._entries = [(group, action) for group, action in entries if action.isEnabled()]
        self._line.clear()
        self._filter("")
        window = self._window
        self.setFixedWidth(min(scaled(_WIDTH), max(240, window.width() - 40)))
        self.move(window.mapToGlobal(QPoint((window.width() - self.width()) // 2, min(90, window.height() // 6))))
        self.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._line.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._line and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
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
        found = [(rank, group, action) for rank, group, action in ranked if rank is not None]
        for _, group, action in sorted(found, key=lambda entry: entry[0]):
            self._add_row(group, action)
        if not found:
            self._show_message(NOTHING_FOUND)
        self._list.setCurrentRow(0 if found else -1)
        self._list.setFixedHeight(scaled(_ROW) * min(_MAX_ROWS, max(1, self._list.count())) + 4)
        self.adjustSize()

    def _show_message(self, text: str) -> None:
        item = QListWidgetItem(text, self._list)
        item.setFlags(Qt.ItemFlag.NoItemFlags)
        item.setSizeHint(QSize(0, scaled(_ROW)))

    def _add_row(self, group: str, action: QAction) -> None:
        item = QListWidgetItem(self._list)
        item.setData(Qt.ItemDataRole.UserRole, action)
        item.setData(Qt.ItemDataRole.AccessibleTextRole, action_text(action))
        row = QWidget()
        line = QHBoxLayout(row)
        line.setContentsMargins(8, 0, 8, 0)
        name, where = PlainLabel(action_text(action)), PlainLabel(f"{group}{_state_text(action)}")
        where.setProperty("look", "muted")
        line.addWidget(name)
        line.addWidget(where)
        line.addStretch()
        if keys := action.shortcut().toString(QKeySequence.SequenceFormat.NativeText):
            key = PlainLabel(keys)
            key.setProperty("look", "key")
            line.addWidget(key)
        hint = row.sizeHint()
        hint.setHeight(scaled(_ROW))
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
    """Return the action's text without mnemonics."""
    return action.text().replace("&", "")


def _state_text(action: QAction) -> str:
    """Return the check state of a checkable action; of an exclusive group, only for the checked one."""
    if not action.isCheckable() or (action.actionGroup() is not None and not action.isChecked()):
        return ""
    return "  ·  on" if action.isChecked() else "  ·  off"


def match_rank(typed: str, text: str, group: str) -> tuple[int, int] | None:
    """Return how well `typed` matches (smaller is better), or None if it does not.

    Order: the whole name, the start of a word, a substring, the group, then all letters in order.
    """
    typed, words = typed.casefold().strip(), text.casefold()
    if not typed:
        return (0, 0)
    if words.rstrip("…") == typed.rstrip("…"):
        return (0, 0)
    if any(word.startswith(typed) for word in words.split()) or words.startswith(typed):
        return (1, not words.startswith(typed))  # ties keep the registry's order
    if typed in words:
        return (2, words.index(typed))
    if typed in group.casefold():
        return (3, len(words))
    letters = iter(words)
    return (4, len(words)) if all(letter in letters for letter in typed if letter != " ") else None
