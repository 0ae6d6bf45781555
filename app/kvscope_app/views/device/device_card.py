"""Card of one GPU or of the host: name and state, a bar of memory by process, and all reported figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from kvscope_app.ui.number_text import UNKNOWN, num_bytes, percent
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label, number_label, set_look
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.device.device_figures import DeviceFigure
from kvscope_app.views.device.memory_users import MemoryUser
from kvscope_app.views.device.process_color import process_color
from kvscope_app.views.memory.stacked_bar import BarSegment, StackedBar

_BAR_HEIGHT: Final = 18
_COLUMN_WIDTH: Final = 250
"""Maximum width of a figure with its name."""


class DeviceCard(QWidget):
    """Card of one device; repaints only what changed."""

    def __init__(self) -> None:
        super().__init__()
        self._theme: Theme = DARK
        self.title = label(look="heading", wraps=True, elastic=True)
        self.state = label(wraps=True)
        self.state_color = "muted"
        self.memory = label(look="muted", elastic=True)
        self.share = number_label()
        self.bar = StackedBar()
        self.bar.setFixedHeight(scaled(_BAR_HEIGHT))
        self._box = QWidget()
        self._grid = QGridLayout(self._box)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._figures: dict[str, tuple[QLabel, QLabel]] = {}
        self._num_columns = 0
        self._pieces: tuple[tuple[MemoryUser, ...], int | None] = ((), None)
        self._lay_out()

    def show_state(self, title: str, text: str, color: str) -> None:
        _set(self.title, title)
        _set(self.state, text)
        self.state.setVisible(bool(text))
        if color != self.state_color:
            self.state_color = color
            self._color_state()

    def show_memory(self, line: str, pieces: Sequence[MemoryUser], total: int | None) -> None:
        """Show memory by user. `total`: bytes that the full bar represents, None if unknown."""
        _set(self.memory, f"Memory {line}")
        taken = sum(piece.num_bytes for piece in pieces)
        _set(self.share, percent(taken / total, 0) if total and pieces else "")
        self._pieces = tuple(pieces), total
        self._show_bar()
        self.bar.setAccessibleName(f"Memory of {self.title.text()}")

    def show_figures(self, figures: Sequence[DeviceFigure]) -> None:
        """Show the figures. Rows are recreated if the names changed."""
        if [told.name for told in figures] != list(self._figures):
            self._make_figures(figures)
        for told in figures:
            value = self._figures[told.name][1]
            _set(value, told.value)
            set_look(value, "warning" if told.is_bad else "muted" if told.value == UNKNOWN else "")

    def value(self, name: str) -> str:
        return self._figures[name][1].text()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.bar.set_colors(theme.raised, theme.panel)
        self._show_bar()
        self._color_state()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place()

    def _show_bar(self) -> None:
        pieces, total = self._pieces
        whole = max(total or 0, sum(piece.num_bytes for piece in pieces), 1)
        self.bar.show_segments(
            [
                BarSegment(
                    piece.num_bytes / whole,
                    process_color(piece.color_index, self._theme),
                    f"{piece.label}: {num_bytes(piece.num_bytes)}",
                )
                for piece in pieces
            ]
        )

    def _color_state(self) -> None:
        color = str(getattr(self._theme, self.state_color))
        self.state.setStyleSheet(f"color: {color};")

    def _make_figures(self, figures: Sequence[DeviceFigure]) -> None:
        for widgets in self._figures.values():
            for widget in widgets:
                self._grid.removeWidget(widget)
                widget.hide()
                widget.deleteLater()
        self._figures = {}
        for told in figures:
            name, value = label(told.name, "muted"), label(wraps=True, elastic=True)
            name.setAlignment(Qt.AlignmentFlag.AlignTop)
            for widget in (name, value):
                widget.setToolTip(told.meaning)
            self._figures[told.name] = name, value
        self._num_columns = 0
        self._place()

    def _place(self) -> None:
        """Arrange the figures in as many columns as fit, filled column by column."""
        columns = max(1, min(4, self.width() // scaled(_COLUMN_WIDTH)))
        if columns == self._num_columns or not self._figures:
            return
        self._num_columns = columns
        rows = -(-len(self._figures) // columns)
        for index, (name, value) in enumerate(self._figures.values()):
            row, column = index % rows, index // rows * 2
            self._grid.addWidget(name, row, column)
            self._grid.addWidget(value, row, column + 1)
        for column in range(8):
            self._grid.setColumnStretch(column, column % 2 if column < 2 * columns else 0)

    def _lay_out(self) -> None:
        line = QHBoxLayout()
        line.addWidget(self.memory, 1)
        line.addWidget(self.share)
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(3)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 4)
        column.setSpacing(4)
        column.addWidget(self.title)
        column.addWidget(self.state)
        column.addLayout(line)
        column.addWidget(self.bar)
        column.addWidget(self._box)


def _set(shown: QLabel, text: str) -> None:
    if shown.text() != text:
        shown.setText(text)
