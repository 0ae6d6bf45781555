"""How the output column of the request table is painted: a small bar below the tokens."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRect
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QStyledItemDelegate, QStyleOptionViewItem

from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.requests.model import PROGRESS_ROLE

_BAR_HEIGHT = 2
_MARGIN = 6


class ProgressDelegate(QStyledItemDelegate):
    """Text as always, and a bar as long as the share that is there."""

    theme: Theme = DARK

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        super().paint(painter, option, index)
        share = index.data(PROGRESS_ROLE)
        if share is None:
            return
        box: QRect = option.rect
        width = box.width() - 2 * _MARGIN
        top = box.bottom() - _BAR_HEIGHT - 1
        painter.fillRect(box.left() + _MARGIN, top, width, _BAR_HEIGHT, QColor(self.theme.border))
        filled = round(width * min(max(share, 0.0), 1.0))
        painter.fillRect(box.left() + _MARGIN, top, filled, _BAR_HEIGHT, QColor(self.theme.accent))
