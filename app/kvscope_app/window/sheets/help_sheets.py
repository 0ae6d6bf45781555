"""The sheets of the Help menu: shortcuts, about, and the engine's log. None of them is modal."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Final

from PySide6.QtCore import Qt, qVersion
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import (
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QStyle,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.look.fonts import mono, sans
from kvscope_app.look.icons import pixmap
from kvscope_app.look.plain_text import PlainLabel
from kvscope_app.look.zoom import scaled
from kvscope_app.window.sheets.command_palette import action_text

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
    ("Measure a range: figures until Esc", "Shift+Drag"),
    ("Select the request in the row above, below", "Up, Down"),
    ("Scroll the requests", "Page Up, Page Down"),
    ("Show the whole timeline", "Double click"),
)
_HEATMAP_KEYS: Final = (
    ("Move the cell", "Arrow keys, Page Up, Page Down"),
    ("Go to the second of the cell", "Enter or click"),
    ("Zoom in time at the pointer", "Wheel"),
    ("Pan in time", "Drag"),
    ("Show the whole timeline", "Double click"),
)


_WIDE_WORDS: Final = "Move the cursor (by steps when zoomed in) "
"""As much of a line as stands beside the widest key."""


class Sheet(QDialog):
    """A window with a heading and a Close button."""

    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(22, 20, 22, 18)
        self.column.setSpacing(12)

    def resize_comfortably(self, width: int, height: int = 0) -> None:
        """To a size of the design at 100 % text: higher where its words take more, never beyond the screen."""
        most = self.screen().availableGeometry().size() * 0.94
        wide = min(scaled(width), most.width())
        self.ensurePolished()
        needed = self.column.totalHeightForWidth(wide) if self.column.hasHeightForWidth() else 0
        self.resize(wide, min(max(scaled(height), needed), most.height()))

    def add_close(self, other: QWidget | None = None) -> None:
        """The button at the end; `other` stands across from it."""
        row = QHBoxLayout()
        if other is not None:
            row.addWidget(other)
        row.addStretch()
        close = QPushButton("Close")
        close.setDefault(True)
        close.clicked.connect(self.close)
        row.addWidget(close)
        self.column.addLayout(row)


def shortcut_sheet(parent: QWidget, entries: Iterable[tuple[str, QAction]], change: Callable[[], object]) -> Sheet:
    """All shortcuts, by group; `change` opens where they are changed."""
    sheet = Sheet("Keyboard shortcuts", parent)
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
    sheet.column.addWidget(area)
    other = QPushButton("Change…")
    other.clicked.connect(lambda: (sheet.close(), change()))
    sheet.add_close(other)
    sheet.resize(_wide_enough(sheet, body), min(scaled(640), round(sheet.screen().availableGeometry().height() * 0.94)))
    return sheet


def versions_text() -> str:
    """What this runs on, in one line."""
    return (
        f"Python {platform.python_version()}, Qt {qVersion()}, PySide6 {version('PySide6-Essentials')},"
        f" {platform.system()} {platform.release()}"
    )


def about_sheet(parent: QWidget) -> Sheet:
    """What this is, in which versions."""
    sheet = Sheet("About kvscope", parent)
    mark, name = PlainLabel(), PlainLabel("kvscope")
    mark.setPixmap(pixmap("kvscope", "#000001", 64))
    name.setFont(sans(1.6))
    words = PlainLabel(
        f"Version {version('kvscope')}\n\nSee inside the KV cache of language-model inference.\n"
        f"Apache License 2.0\n\n{versions_text()}"
    )
    words.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    words.setWordWrap(True)
    row, text = QHBoxLayout(), QVBoxLayout()
    row.setSpacing(18)
    row.addWidget(mark, 0, Qt.AlignmentFlag.AlignTop)
    text.addWidget(name)
    text.addWidget(words)
    text.addStretch()
    row.addLayout(text, 1)
    sheet.column.addLayout(row)
    sheet.add_close()
    sheet.resize_comfortably(440)
    return sheet


def log_sheet(parent: QWidget, log: str) -> Sheet:
    """The end of the engine's log."""
    sheet = Sheet("Engine log", parent)
    text = QPlainTextEdit(log or "The engine printed nothing.")
    text.setReadOnly(True)
    text.setFont(mono())
    text.setAccessibleName("Engine log")
    sheet.column.addWidget(text)
    sheet.add_close()
    sheet.resize_comfortably(820, 520)
    text.verticalScrollBar().setValue(text.verticalScrollBar().maximum())
    return sheet


def _add_group(grid: QGridLayout, group: str, rows: list[tuple[str, str]]) -> None:
    heading = PlainLabel(group)
    heading.setProperty("look", "heading")
    heading.setContentsMargins(0, 10 if grid.rowCount() > 1 else 0, 0, 2)
    grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
    for text, keys in rows:
        row = grid.rowCount()
        key = PlainLabel(keys)
        key.setProperty("look", "key")
        words = PlainLabel(text)
        words.setWordWrap(True)
        grid.addWidget(words, row, 0)
        grid.addWidget(key, row, 1, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)


def _wide_enough(sheet: Sheet, body: QWidget) -> int:
    """So that no key is cut: words give way to keys, by a second line, where the screen is narrow."""
    margins = sheet.column.contentsMargins()
    words = sheet.fontMetrics().horizontalAdvance(_WIDE_WORDS)
    keys = max(label.sizeHint().width() for label in body.findChildren(QLabel) if label.property("look") == "key")
    bar = sheet.style().pixelMetric(QStyle.PixelMetric.PM_ScrollBarExtent) + scaled(12 + 28)
    wide = words + keys + bar + margins.left() + margins.right()
    return min(wide, sheet.screen().availableGeometry().width())
