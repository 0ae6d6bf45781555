"""How an event is painted where a table is too narrow for columns: its head in one line, below it the reason, wrapped.

A card is as high as its reason takes, up to a number of lines; the rest of a longer one is left to the tooltip.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QModelIndex, QObject, QPersistentModelIndex, QPointF, QRect, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter, QPalette, QTextLayout, QTextOption
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from kvscope_app.views.events.event_entries import EventEntries, why_text

_LINES_BELOW_WIDTH: Final = ((420, 4), (640, 3))
_FEWEST_LINES: Final = 2
_MARGIN: Final = 8
_GAP: Final = 10
_PADDING: Final = 4


class EventCard(QStyledItemDelegate):
    """Paints the entry of a row, whatever the column."""

    def __init__(self, model: EventEntries, parent: QObject) -> None:
        super().__init__(parent)
        self._events = model

    @staticmethod
    def greatest_height(line: int, width: int) -> int:
        """Of a card that is `width` wide, for a font whose lines are `line` pixels high."""
        return (1 + _most_lines(width)) * line + 2 * _PADDING

    def height(self, row: int, font: QFont, width: int) -> int:
        """Of the card of a row, `width` wide."""
        entry = self._events.entry_at(row)
        text = "" if entry is None else why_text(entry.event)
        num_lines = len(_lines(text, font, width - 2 * _MARGIN, _most_lines(width)))
        return (1 + num_lines) * QFontMetrics(font).height() + 2 * _PADDING

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        entry = self._events.entry_at(index.row())
        if entry is None:
            return
        painter.save()
        box: QRect = option.rect
        palette: QPalette = option.palette
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(box, palette.highlight())
        inner = box.adjusted(_MARGIN, _PADDING, -_MARGIN, -_PADDING)
        at, kind, request = self._events.head(entry)
        theme, line = self._events.theme, QFontMetrics(painter.font()).height()
        x = inner.left()
        is_ahead = self._events.is_ahead(entry)
        ink = theme.color("muted" if is_ahead else "text")
        for text, color in ((kind, ink if is_ahead else self._events.kind_color(entry)), (request, ink)):
            x = _word(painter, QRect(x, inner.top(), inner.right() - x, line), text, color) if text else x
        painter.setPen(theme.color("muted"))
        painter.drawText(QRect(x, inner.top(), inner.right() - x, line), Qt.AlignmentFlag.AlignRight, at)
        painter.setPen(ink)
        _reason(painter, inner.adjusted(0, line, 0, 0), why_text(entry.event))
        painter.setPen(theme.color("border"))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        painter.restore()


def _most_lines(width: int) -> int:
    """Of the reason: what is usual fits."""
    return next((lines for below, lines in _LINES_BELOW_WIDTH if width < below), _FEWEST_LINES)


def _word(painter: QPainter, box: QRect, text: str, color: QColor) -> int:
    """Where the next word begins."""
    painter.setPen(color)
    painter.drawText(box, Qt.AlignmentFlag.AlignLeft, text)
    return box.left() + painter.fontMetrics().horizontalAdvance(text) + _GAP


def _lines(text: str, font: QFont, width: int, most: int) -> list[str]:
    """`text` in lines that are `width` wide, at most so many: the last has all the rest."""
    layout = QTextLayout(text, font)
    layout.setTextOption(QTextOption(Qt.AlignmentFlag.AlignLeft))
    layout.beginLayout()
    begins: list[int] = []
    while len(begins) < most and (line := layout.createLine()).isValid():
        line.setLineWidth(max(width, 1))
        begins.append(line.textStart())
    layout.endLayout()
    return [text[begin:end].strip() for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]


def _reason(painter: QPainter, box: QRect, text: str) -> None:
    """As many lines as there is room for, the last with an ellipsis where more would follow."""
    metrics = painter.fontMetrics()
    lines = _lines(text, painter.font(), box.width(), max(1, box.height() // metrics.height()))
    for number, words in enumerate(lines):
        painter.drawText(
            QPointF(box.left(), box.top() + number * metrics.height() + metrics.ascent()),
            metrics.elidedText(words, Qt.TextElideMode.ElideRight, box.width()),
        )
