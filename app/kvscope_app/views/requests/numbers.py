"""Page shown instead of the request table for an engine that reports the number of requests but no individual requests.

Below the counts it shows the engine's other metrics, such as pools, lower tiers, and why requests wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import NOTHING, count, num_bytes, percent, seconds
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.widget_factories import label, number_label
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.views.capability_messages import why_no_requests
from kvscope_telemetry.messages.telemetry import MetricFigure
from kvscope_telemetry.mirror.mirror import Mirror

MAX_FIGURES: Final = 64
_COLUMNS: Final = 2
_NUMBER_SCALE: Final = 1.9
_NUMBERS: Final = (
    ("num_running", "Running", "Requests that hold blocks and generate tokens"),
    ("num_waiting", "Waiting", "In the engine's queue"),
    ("finished", "Finished", "Since the engine started"),
    ("aborted", "Aborted", "Since the engine started"),
    ("preemptions", "Preemptions", "Number of times that a request's blocks were freed for another one"),
    ("cached_tokens", "Prompt tokens from the cache", "New requests' prompt tokens found in the cache"),
    ("prompt_tokens", "Prompt tokens computed", "New requests' prompt tokens not in the cache"),
    ("generation_tokens", "Tokens generated", "Since the engine started"),
)
"""Counts shown on the page: (field of `Counters`, label, tooltip)."""


class RequestNumbers(QScrollArea):
    def __init__(self) -> None:
        super().__init__()
        self._reason_label = label(look="muted", wraps=True)
        self._values: dict[str, QLabel] = {}
        grid = QGridLayout()
        grid.setHorizontalSpacing(36)
        grid.setVerticalSpacing(14)
        for index, (name, caption, meaning) in enumerate(_NUMBERS):
            grid.addWidget(self._cell(name, caption, meaning), index // _COLUMNS, index % _COLUMNS)
        for index in range(_COLUMNS):
            grid.setColumnStretch(index, 1)
        self.figures = _Figures()
        page = QWidget()
        self.setWidget(page)
        self.setWidgetResizable(True)
        self.setFrameShape(QScrollArea.Shape.NoFrame)
        column = QVBoxLayout(page)
        column.setContentsMargins(16, 14, 16, 14)
        column.setSpacing(16)
        column.addWidget(self._reason_label)
        column.addLayout(grid)
        column.addWidget(self.figures)
        column.addStretch(1)

    def show_numbers(self, mirror: Mirror) -> None:
        self._reason_label.setText(f"{why_no_requests(mirror.capabilities)}.")
        for name, value in self._values.items():
            is_available = mirror.capabilities.blocks and (name != "aborted" or mirror.capabilities.aborts)
            text = count(getattr(mirror.counters, name)) if is_available else NOTHING
            if value.text() != text:
                value.setText(text)

        self.figures.show_figures(mirror.figures)

    def value(self, name: str) -> str:
        return self._values[name].text()

    def _cell(self, name: str, caption: str, meaning: str) -> QWidget:
        cell, value, caption_label = QWidget(), label(), ElidedLabel(caption)
        caption_label.setProperty("look", "muted")
        value.setFont(sans(_NUMBER_SCALE))
        value.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        value.setAccessibleName(caption)
        cell.setToolTip(meaning)
        column = QVBoxLayout(cell)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(value)
        column.addWidget(caption_label)
        self._values[name] = value
        return cell


class _Figures(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, QLabel] = {}
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(18)
        self._grid.setVerticalSpacing(5)
        self._grid.setColumnStretch(0, 1)
        self._grid.addWidget(label("From the server's metrics", "heading"), 0, 0, 1, 2)
        self.hide()

    def show_figures(self, figures: tuple[MetricFigure, ...]) -> None:
        """Show the first `MAX_FIGURES` figures, in order. Lines are recreated if the names changed."""
        shown = {figure.name: figure for figure in figures[:MAX_FIGURES]}
        if list(shown) != list(self._values):
            self._build_lines(shown)
        for name, figure in shown.items():
            self._values[name].setText(figure_text(figure))
        self.setVisible(bool(shown))

    def lines(self) -> list[tuple[str, str]]:
        return [(name, value.text()) for name, value in self._values.items()]

    def _build_lines(self, figures: Mapping[str, MetricFigure]) -> None:
        while (item := self._grid.takeAt(1)) is not None:
            if (widget := item.widget()) is not None:
                widget.deleteLater()
        self._values = {name: number_label() for name in figures}
        for row, (name, figure) in enumerate(figures.items(), start=1):
            name_label = ElidedLabel(name)
            name_label.setProperty("look", "muted")
            self._values[name].setAccessibleName(name)
            for index, widget in enumerate((name_label, self._values[name])):
                widget.setToolTip(plain_tip(figure.metric))
                self._grid.addWidget(widget, row, index)


def figure_text(figure: MetricFigure) -> str:
    if figure.unit == "share":
        return percent(figure.value)
    if figure.unit == "bytes":
        return num_bytes(figure.value)
    if figure.unit == "s":
        return seconds(figure.value)
    return f"{count(figure.value)} {figure.unit}".strip()
