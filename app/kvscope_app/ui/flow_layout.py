"""Layout that places widgets side by side and wraps to another line when the next one does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QMargins, QRect, QSize, Qt
from PySide6.QtWidgets import QLayout, QLayoutItem, QSizePolicy, QWidget

_Line = list[tuple[QLayoutItem, int]]
"""Items of a line, each with its wanted width in pixels."""


class FlowLayout(QLayout):
    """Lines of widgets, each at least as wide as its size hint if there is space.

    The remaining width of a line goes to widgets that may expand. Without any, the last widget is right-aligned.
    """

    def __init__(self, *widgets: QWidget, margins: QMargins, spacing: int = 8) -> None:
        super().__init__()
        self._items: list[QLayoutItem] = []
        self.setContentsMargins(margins)
        self.setSpacing(spacing)
        for widget in widgets:
            self.addWidget(widget)

    def addItem(self, item: QLayoutItem) -> None:
        self._items.append(item)

    def count(self) -> int:
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:
        return Qt.Orientation.Horizontal

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        margins = self.contentsMargins()
        heights = [_height(line) for line in self._lines(width - margins.left() - margins.right())]
        return sum(heights) + self.spacing() * max(len(heights) - 1, 0) + margins.top() + margins.bottom()

    def sizeHint(self) -> QSize:
        visible = self._visible_items()
        margins = self.contentsMargins()
        width = sum(map(_preferred_width, visible)) + self.spacing() * max(len(visible) - 1, 0)
        width += margins.left() + margins.right()
        return QSize(width, self.heightForWidth(width))

    def minimumSize(self) -> QSize:
        visible, margins = self._visible_items(), self.contentsMargins()
        width = max((item.minimumSize().width() for item in visible), default=0)
        height = max((item.sizeHint().height() for item in visible), default=0)
        return QSize(width + margins.left() + margins.right(), height + margins.top() + margins.bottom())

    def setGeometry(self, rect: QRect) -> None:
        super().setGeometry(rect)
        inner = rect.marginsRemoved(self.contentsMargins())
        top = inner.top()
        for line in self._lines(inner.width()):
            height, left = _height(line), inner.left()
            widths = _final_widths(line, inner.width() - self.spacing() * (len(line) - 1))
            for index, ((item, _), width) in enumerate(zip(line, widths, strict=True)):
                if width < 0:  # the last one, at the right
                    width = -width
                    left = inner.right() + 1 - width
                item_height = min(item.sizeHint().height(), height)
                item.setGeometry(QRect(left, top + (height - item_height) // 2, width, item_height))
                left += width + self.spacing() * (index + 1 < len(line))
            top += height + self.spacing()

    def _visible_items(self) -> list[QLayoutItem]:
        return [item for item in self._items if not item.isEmpty()]

    def _lines(self, width: int) -> Iterator[_Line]:
        line: _Line = []
        left = 0
        for item in self._visible_items():
            item_width = min(_preferred_width(item), max(width, item.minimumSize().width()))
            if line and left + item_width > width:
                yield line
                line, left = [], 0
            line.append((item, item_width))
            left += item_width + self.spacing()
        if line:
            yield line


def _preferred_width(item: QLayoutItem) -> int:
    """Return the width of the item's size hint, even if the widget's size policy makes Qt ignore it."""
    widget = item.widget()
    return item.sizeHint().width() if widget is None else max(widget.sizeHint().width(), item.minimumSize().width())


def _height(line: _Line) -> int:
    return max(item.sizeHint().height() for item, _ in line)


def _final_widths(line: _Line, width: int) -> list[int]:
    """Return the width of each item after distributing the remaining width. A negative width means right-aligned."""
    widths = [item_width for _, item_width in line]
    free_width = max(width - sum(widths), 0)
    expanding = [index for index, (item, _) in enumerate(line) if _may_grow(item)]
    for nth, index in enumerate(expanding):
        widths[index] += free_width // len(expanding) + (nth < free_width % len(expanding))
    if not expanding and len(widths) > 1:
        widths[-1] = -widths[-1]
    return widths


def _may_grow(item: QLayoutItem) -> bool:
    widget = item.widget()
    policy = QSizePolicy.Policy.Fixed if widget is None else widget.sizePolicy().horizontalPolicy()
    return policy in (QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Ignored)
