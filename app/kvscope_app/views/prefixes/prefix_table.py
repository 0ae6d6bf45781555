"""Widget of the prefix table: expanding by keyboard and mouse, copying, context menu, column widths."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Final

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPoint, QPointF, QRect, QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence, QMouseEvent, QPainter, QPen
from PySide6.QtWidgets import (
    QMenu,
    QStyle,
    QStyleOptionViewItem,
)

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.prefixes.prefix_columns import COLUMNS, PREFIX, WITH_BELOW
from kvscope_app.views.prefixes.prefix_model import PrefixModel
from kvscope_app.views.table import RowTable, SwatchDelegate

INDENT: Final = 16
SIGN_WIDTH: Final = 18
_MAX_LEVELS: Final = 12
"""Maximum number of indented levels. Deeper nodes are not indented further, so that their text stays visible."""
_PREFIX_SHARE = 0.36
_MIN_PREFIX_WIDTH = 190


class PrefixTable(RowTable):
    """Table sorted by its headers. Right and Left expand and collapse rows; Escape clears the selection."""

    released = Signal()

    def __init__(self, model: PrefixModel) -> None:
        super().__init__("Prefix tree", is_multi_select=True)
        self._prefixes = model
        self._delegate = BranchDelegate(model)
        self._has_own_widths = False
        self.setModel(model)
        self.setItemDelegateForColumn(PREFIX, self._delegate)
        self._set_up_appearance()
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._show_menu)

    def apply_theme(self, theme: Theme) -> None:
        self._delegate.theme = theme
        self.viewport().update()

    def visible_rows(self) -> range:
        first = self.rowAt(0)
        last = self.rowAt(self.viewport().height() - 1)
        return range(max(first, 0), (self._prefixes.rowCount() if last < 0 else last + 1) if first >= 0 else 0)

    def fit(self, width: int) -> None:
        """Set the width of the first column so that as many other columns as possible are completely visible."""
        min_width = max(round(width * _PREFIX_SHARE), _MIN_PREFIX_WIDTH)
        others = accumulate(self.columnWidth(column) for column in range(1, len(COLUMNS)))
        self.setColumnWidth(
            PREFIX,
            width - max((others_width for others_width in others if width - others_width >= min_width), default=0),
        )

    def keyPressEvent(self, event: QKeyEvent) -> None:
        row = self.currentIndex().row()
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy_selected()
        elif event.key() == Qt.Key.Key_Escape:
            self.released.emit()
        elif row < 0 or event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier:
            super().keyPressEvent(event)
        elif event.key() == Qt.Key.Key_Right:
            self._expand_or_descend(row)
        elif event.key() == Qt.Key.Key_Left:
            self._collapse_or_ascend(row)
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._prefixes.set_expanded(row, not self._prefixes.is_expanded(row))
        else:
            super().keyPressEvent(event)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        index = self.indexAt(event.position().toPoint())
        if event.button() == Qt.MouseButton.LeftButton and self._is_on_sign(index, event.position().toPoint()):
            self._prefixes.set_expanded(index.row(), not self._prefixes.is_expanded(index.row()))
            return
        super().mousePressEvent(event)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        index = self.indexAt(event.position().toPoint())
        if event.button() == Qt.MouseButton.LeftButton and index.isValid():
            self._prefixes.set_expanded(index.row(), not self._prefixes.is_expanded(index.row()))

    def copy_selected(self) -> None:
        lines = [[column.title for column in COLUMNS]]
        lines += [self._prefixes.line(row) for row in self.selected_rows()]
        if len(lines) > 1:
            text = "\n".join("\t".join(map(_one_line, line)) for line in lines)
            QGuiApplication.clipboard().setText(text + "\n")

    def selected_rows(self) -> list[int]:
        return sorted(index.row() for index in self.selectionModel().selectedRows())

    def _expand_or_descend(self, row: int) -> None:
        if self._prefixes.is_expanded(row):
            self.selectRow(row + 1)
        else:
            self._prefixes.set_expanded(row, True)

    def _collapse_or_ascend(self, row: int) -> None:
        parent = self._prefixes.parent_row(row)
        if self._prefixes.has_children(row) and self._prefixes.is_expanded(row):
            self._prefixes.set_expanded(row, False)
        elif parent is not None:
            self.selectRow(parent)

    def _is_on_sign(self, index: QModelIndex, position: QPoint) -> bool:
        if not index.isValid() or index.column() != PREFIX or not self._prefixes.has_children(index.row()):
            return False
        right = self.columnViewportPosition(PREFIX) + self._delegate.sign_right(index.row())
        return right - scaled(SIGN_WIDTH) <= position.x() < right

    def _show_menu(self, position: QPoint) -> None:
        row = self.indexAt(position).row()
        menu = QMenu(self)
        if row >= 0 and self._prefixes.has_children(row):
            is_expanded = self._prefixes.is_expanded(row)
            menu.addAction(
                "Close" if is_expanded else "Open", partial(self._prefixes.set_expanded, row, not is_expanded)
            )
        menu.addAction("Expand all", partial(self._prefixes.set_all_expanded, True))
        menu.addAction("Collapse all", partial(self._prefixes.set_all_expanded, False))
        menu.addSeparator()
        menu.addAction("Copy rows", self.copy_selected).setEnabled(bool(self.selected_rows()))
        menu.addAction("Clear selection", self.released.emit)
        menu.exec(self.viewport().mapToGlobal(position))
        menu.deleteLater()

    def _set_up_appearance(self) -> None:
        self.fix_row_heights(9)
        self.setSortingEnabled(True)
        self.sortByColumn(WITH_BELOW, Qt.SortOrder.DescendingOrder)
        self.setIconSize(QSize(scaled(10), scaled(10)))
        self.fit_samples(COLUMNS)


def _one_line(text: str) -> str:
    return text.replace("\t", " ").replace("\n", "⏎").replace("\r", "")


class BranchDelegate(SwatchDelegate):
    """Paints the first column: text indented by the node's level, after the sign that expands or collapses the node."""

    theme: Theme = DARK

    def __init__(self, model: PrefixModel) -> None:
        super().__init__()
        self._model = model

    def sign_right(self, row: int) -> int:
        """Return the right edge of the expand sign, where the text starts, in pixels from the left edge of the cell."""
        return scaled(SIGN_WIDTH) + scaled(INDENT) * min(self._model.level_at(row), _MAX_LEVELS)

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        cell: QRect = QRect(option.rect)
        text_left = self.sign_right(index.row())
        _fill_selected(painter, option, cell)
        option.rect = cell.adjusted(text_left, 0, 0, 0)
        super().paint(painter, option, index)
        if self._model.has_children(index.row()):
            self._draw_sign(painter, cell, text_left, self._model.is_expanded(index.row()))

    def _draw_sign(self, painter: QPainter, cell: QRect, text_left: int, is_expanded: bool) -> None:
        x, y = cell.left() + text_left - scaled(SIGN_WIDTH) / 2, cell.center().y() + 0.5
        short, long = scaled(2), scaled(4)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(
            QPen(self.theme.color("muted"), scaled(16) / 10, c=Qt.PenCapStyle.RoundCap, j=Qt.PenJoinStyle.RoundJoin)
        )
        if is_expanded:
            painter.drawPolyline([QPointF(x - long, y - short), QPointF(x, y + short), QPointF(x + long, y - short)])
        else:
            painter.drawPolyline([QPointF(x - short, y - long), QPointF(x + short, y), QPointF(x - short, y + long)])
        painter.restore()


def _fill_selected(painter: QPainter, option: QStyleOptionViewItem, cell: QRect) -> None:
    if option.state & QStyle.StateFlag.State_Selected:
        painter.fillRect(cell, option.palette.highlight())
