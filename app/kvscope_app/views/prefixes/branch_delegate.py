"""How the first column of the prefix table is painted: as deep as the node is, with a sign that opens it."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPointF, QRect, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.prefixes.model import PrefixModel

INDENT: Final = 16
SIGN_WIDTH: Final = 18
_MAX_LEVELS: Final = 12
"""Deeper nodes are indented no more: their text would not be seen."""


class BranchDelegate(QStyledItemDelegate):
    """The text as always, moved to the right."""

    theme: Theme = DARK

    def __init__(self, model: PrefixModel) -> None:
        super().__init__()
        self._model = model

    def sign_right(self, row: int) -> int:
        """Where the sign ends and the text begins, from the left of the cell."""
        return SIGN_WIDTH + INDENT * min(self._model.level_at(row), _MAX_LEVELS)

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        whole: QRect = QRect(option.rect)
        shift = self.sign_right(index.row())
        _fill_selected(painter, option, whole)
        option.rect = whole.adjusted(shift, 0, 0, 0)
        super().paint(painter, option, index)
        if self._model.has_below(index.row()):
            self._draw_sign(painter, whole, shift, self._model.is_open(index.row()))

    def _draw_sign(self, painter: QPainter, cell: QRect, shift: int, is_open: bool) -> None:
        x, y = cell.left() + shift - SIGN_WIDTH / 2, cell.center().y() + 0.5
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(self.theme.color("muted"), 1.6, c=Qt.PenCapStyle.RoundCap, j=Qt.PenJoinStyle.RoundJoin))
        if is_open:
            painter.drawPolyline([QPointF(x - 4, y - 2), QPointF(x, y + 2), QPointF(x + 4, y - 2)])
        else:
            painter.drawPolyline([QPointF(x - 2, y - 4), QPointF(x + 2, y), QPointF(x - 2, y + 4)])
        painter.restore()


def _fill_selected(painter: QPainter, option: QStyleOptionViewItem, cell: QRect) -> None:
    """The ground of a selected row begins where the row does."""
    if option.state & QStyle.StateFlag.State_Selected:
        painter.fillRect(cell, option.palette.highlight())
