"""Dialog that lists all shortcuts by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import (
    QGridLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QStyle,
    QWidget,
)

from kvscope_app.actions.command_palette import action_text
from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.zoom import scaled

_MAP_KEYS: Final = (
    ("Move the cursor", "Arrow keys"),
    ("Ten rows", "Page Up, Page Down"),
    ("Select the request that holds the block", "Enter or click"),
    ("Select the next request that shares it", "Click again"),
    ("Clear the selection", "Esc"),
    ("Pan", "Drag, or Shift+Arrow keys"),
    ("Zoom at the pointer", "Wheel"),
)
_CHART_KEYS: Final = (
    ("Zoom in time at the pointer", "Ctrl+Wheel"),
    ("Pan in time", "Drag"),
    ("Show all values at a time", "Point at it, or Shift+Left, Shift+Right"),
    ("Go to that time", "Enter or click"),
    ("Pan in time (focused chart)", "Left, Right"),
)
_TIMELINE_KEYS: Final = (
    ("Move the cursor (by steps when zoomed in)", "Left, Right"),
    ("Pan in time", "A, D, Shift+Left, Shift+Right, or drag"),
    ("Zoom in time at the pointer", "Wheel, or W, S"),
    ("Measure a range (Esc ends it)", "Shift+Drag"),
    ("Select the request in the row above, below", "Up, Down"),
    ("Scroll lanes and requests", "Ctrl+Wheel, or Page Up, Page Down"),
    ("Show the whole timeline", "Double click"),
)
_HEATMAP_KEYS: Final = (
    ("Select another cell", "Arrow keys, Page Up, Page Down"),
    ("Go to the time of the cell", "Enter or click"),
    ("Zoom in time at the pointer", "Wheel"),
    ("Pan in time", "Drag"),
    ("Show the whole timeline", "Double click"),
)


_WIDEST_TEXT: Final = "Move the cursor (by steps when zoomed in) "
"""Longest action text that still fits on one line next to the widest key."""


def shortcut_dialog(parent: QWidget, entries: Iterable[tuple[str, QAction]], change: Callable[[], object]) -> Sheet:
    dialog = Sheet("Keyboard shortcuts", parent)
    groups: dict[str, list[tuple[str, str]]] = {
        "Page map, when it has the focus": list(_MAP_KEYS),
        "Throughput, over a chart": list(_CHART_KEYS),
        "Timeline, when it has the focus": list(_TIMELINE_KEYS),
        "Fragmentation, when it has the focus": list(_HEATMAP_KEYS),
    }
    for group, action in entries:
        keys = ", ".join(k.toString(QKeySequence.SequenceFormat.NativeText) for k in action.shortcuts())
        if keys:
            groups.setdefault(group, []).append((action_text(action).rstrip("…"), keys))
    body = QWidget()
    grid = QGridLayout(body)
    grid.setContentsMargins(0, 0, 12, 0)
    grid.setHorizontalSpacing(28)
    grid.setVerticalSpacing(6)
    for group in sorted(groups, key=lambda name: ", " in name):
        _add_group(grid, group, groups[group])
    area = QScrollArea()
    area.setWidgetResizable(True)
    area.setFrameShape(QScrollArea.Shape.NoFrame)
    area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    area.setWidget(body)
    dialog.column.addWidget(area)
    change_button = QPushButton("Change…")
    change_button.clicked.connect(lambda: (dialog.close(), change()))
    dialog.add_close(change_button)
    dialog.resize(
        _fitting_width(dialog, body), min(scaled(640), round(dialog.screen().availableGeometry().height() * 0.94))
    )
    return dialog


def _add_group(grid: QGridLayout, group: str, rows: list[tuple[str, str]]) -> None:
    heading = PlainLabel(group)
    heading.setProperty("look", "heading")
    heading.setContentsMargins(0, 10 if grid.rowCount() > 1 else 0, 0, 2)
    grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
    for text, keys in rows:
        row = grid.rowCount()
        key_label = PlainLabel(keys)
        key_label.setProperty("look", "key")
        text_label = PlainLabel(text)
        text_label.setWordWrap(True)
        grid.addWidget(text_label, row, 0)
        grid.addWidget(key_label, row, 1, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)


def _fitting_width(dialog: Sheet, body: QWidget) -> int:
    """Return a width at which no shortcut text is clipped, at most the screen's width. On a narrow screen,
    action texts wrap.
    """
    margins = dialog.column.contentsMargins()
    text_width = dialog.fontMetrics().horizontalAdvance(_WIDEST_TEXT)
    key_width = max(label.sizeHint().width() for label in body.findChildren(QLabel) if label.property("look") == "key")
    scroll_bar_width = dialog.style().pixelMetric(QStyle.PixelMetric.PM_ScrollBarExtent) + scaled(12 + 28)
    width = text_width + key_width + scroll_bar_width + margins.left() + margins.right()
    return min(width, dialog.screen().availableGeometry().width())
