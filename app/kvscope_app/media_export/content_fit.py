"""Measures how much of a view's content does not fit into the view.

Exported pictures are enlarged by that much, or state what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QAbstractItemView, QAbstractScrollArea, QGraphicsView, QTableView, QWidget

from kvscope_app.views.chart.chart_legend import ChartLegend

_BY_ROW = QAbstractItemView.ScrollMode.ScrollPerItem


def overflow(view: QWidget) -> QSize:
    """Return the extra width and height in pixels that `view` needs for its lists, scroll areas and chart titles."""
    hidden = QSize(0, 0)
    for area in _scroll_areas(view):
        hidden = hidden.expandedTo(QSize(area.horizontalScrollBar().maximum(), _hidden_height(area)))
    for legend in view.findChildren(ChartLegend):
        if legend.isVisibleTo(view):
            num_columns = max(view.width() // max(legend.width(), 1), 1)  # extra width is divided among the columns
            hidden = hidden.expandedTo(QSize(legend.missing_width * num_columns, 0))
    return hidden


def hidden_content_text(view: QWidget) -> str:
    """Return a text that says what does not fit into `view`, such as "12 more rows"; empty if everything fits."""
    notes = []
    for area in _scroll_areas(view):
        if area.verticalScrollBar().maximum() > 0:
            num_rows = _num_rows_below(area) if isinstance(area, QTableView) else 0
            notes.append(f"{num_rows:,} more row{'s' if num_rows > 1 else ''}" if num_rows else "more below")
        elif area.horizontalScrollBar().maximum() > 0:
            notes.append("more to the right")
    return ", ".join(dict.fromkeys(notes))


def _scroll_areas(view: QWidget) -> Iterator[QAbstractScrollArea]:
    """Yield the areas of `view` that a user could scroll. Charts never scroll, although they are scroll areas in Qt."""
    for area in view.findChildren(QAbstractScrollArea):
        if area.isVisibleTo(view) and not isinstance(area, QGraphicsView):
            if isinstance(area, QAbstractItemView):
                area.doItemsLayout()  # otherwise the scroll bars are updated only with the next event
            yield area


def _hidden_height(area: QAbstractScrollArea) -> int:
    steps = area.verticalScrollBar().maximum()
    if isinstance(area, QAbstractItemView) and area.verticalScrollMode() is _BY_ROW:
        return steps * max(area.sizeHintForRow(0), 1)
    return steps


def _num_rows_below(table: QTableView) -> int:
    first_hidden = table.rowAt(table.viewport().height() - 1)
    return 0 if first_hidden < 0 else table.model().rowCount() - first_hidden
