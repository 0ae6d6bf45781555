"""Search popup for blocks, requests, steps and text. Enter selects the current result in every view."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QObject, QPoint, Qt
from PySide6.QtGui import QCloseEvent, QKeyEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLineEdit, QListWidget, QListWidgetItem, QVBoxLayout, QWidget

from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.inspector.finder import Finder
from kvscope_app.views.inspector.findings import Finding

_WIDTH: Final = 560
_ROW_HEIGHT: Final = 34
_MAX_ROWS: Final = 11
_MAX_FINDINGS: Final = 24
_HELP: Final = (
    "Block: 17, H3 (host memory), D3 (disk). Recurrent state: S3, HS3. Request: #12, its id or adapter. Step number."
    " Text in blocks."
)
_NO_MATCH: Final = "No match at this time."


class FindSheet(QFrame):
    """Popup with a search field and the results. It closes when it loses the focus."""

    def __init__(self, parent: QWidget, finder: Finder) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setProperty("look", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.line, self.list = QLineEdit(), QListWidget()
        self.note = label(_HELP, "muted", wraps=True)
        self._window, self._finder = parent, finder
        self._entered_row = -1
        self.line.setPlaceholderText("Find a block, a request, a step or text")
        self.line.setAccessibleName("Find")
        self.line.setClearButtonEnabled(True)
        self.list.setProperty("look", "palette")
        self.list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.note.setContentsMargins(6, 2, 6, 2)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 8, 8, 8)
        column.addWidget(self.line)
        column.addWidget(self.list)
        column.addWidget(self.note)
        self.line.textChanged.connect(self._on_typed)
        self.line.installEventFilter(self)
        self.list.itemClicked.connect(lambda _: self._choose())
        finder.texts.found.connect(self._add)
        finder.texts.changed.connect(self._show_note)

    def show_above(self) -> None:
        window = self._window
        self.setFixedWidth(min(scaled(_WIDTH), max(240, window.width() - 40)))
        self._adjust_height()
        self.move(window.mapToGlobal(QPoint((window.width() - self.width()) // 2, min(90, window.height() // 6))))
        self.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.line.setFocus()

    def closeEvent(self, event: QCloseEvent) -> None:
        self._finder.texts.search("")
        super().closeEvent(event)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.line and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            step = {Qt.Key.Key_Down: 1, Qt.Key.Key_Up: -1}.get(Qt.Key(event.key()))
            if step is not None and self.list.count():
                self.list.setCurrentRow((self.list.currentRow() + step) % self.list.count())
                return True
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._enter(-1 if event.modifiers() & Qt.KeyboardModifier.ShiftModifier else 1)
                return True
        return super().eventFilter(watched, event)

    def _on_typed(self, query: str) -> None:
        self.list.clear()
        self._entered_row = -1
        for finding in self._finder.find(query):
            self._add(finding)
        self._show_note()

    def _add(self, finding: Finding) -> None:
        if self.list.count() >= _MAX_FINDINGS:
            return
        item = QListWidgetItem(self.list)
        item.setData(Qt.ItemDataRole.UserRole, finding)
        item.setData(Qt.ItemDataRole.AccessibleTextRole, f"{finding.text}, {finding.detail}")
        row = QWidget()
        line = QHBoxLayout(row)
        line.setContentsMargins(8, 0, 8, 0)
        detail = ElidedLabel(finding.detail)
        detail.setProperty("look", "muted")
        line.addWidget(PlainLabel(finding.text))
        line.addWidget(detail, 1)
        hint = row.sizeHint()
        hint.setHeight(_ROW_HEIGHT)
        item.setSizeHint(hint)
        self.list.setItemWidget(item, row)
        if self.list.count() == 1:
            self.list.setCurrentRow(0)
        self._adjust_height()

    def _show_note(self) -> None:
        query, note = self.line.text().strip(), self._finder.texts.note
        no_match = _NO_MATCH if query and not self.list.count() else ""
        self.note.setText(" ".join(filter(None, (no_match, note))) if query else _HELP)
        self.note.setVisible(bool(self.note.text()))
        self._adjust_height()

    def _adjust_height(self) -> None:
        self.list.setVisible(self.list.count() > 0)
        self.list.setFixedHeight(_ROW_HEIGHT * min(_MAX_ROWS, max(1, self.list.count())) + 4)
        self.adjustSize()

    def _enter(self, step: int) -> None:
        """Choose the current result and close. Among several text matches, Enter again chooses the next one (`step` 1)
        or the previous (-1), and the popup stays open.
        """
        row = self.list.currentRow()
        finding = self._finding_at(row)
        if finding is None or not finding.is_text or self.list.count() == 1:
            self._choose()
            return
        if row == self._entered_row:
            row = (row + step) % self.list.count()
            self.list.setCurrentRow(row)
            finding = self._finding_at(row)
        self._entered_row = row
        if finding is not None:
            self._finder.choose(finding)

    def _choose(self) -> None:
        finding = self._finding_at(self.list.currentRow())
        if finding is not None:
            self.close()
            self._finder.choose(finding)

    def _finding_at(self, row: int) -> Finding | None:
        item = self.list.item(row) if row >= 0 else None
        finding = None if item is None else item.data(Qt.ItemDataRole.UserRole)
        return finding if isinstance(finding, Finding) else None
