"""Card of one GPU or of the host: name, state, a bar of memory by process, and all reported figures."""

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
"""Minimum width in pixels, at 100 % zoom, of a column of figures (name and value)."""


class DeviceCard(QWidget):
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
        self._memory: tuple[tuple[MemoryUser, ...], int | None] = ((), None)
        self._lay_out()

    def show_state(self, title: str, text: str, color: str) -> None:
        _set_text(self.title, title)
        _set_text(self.state, text)
        self.state.setVisible(bool(text))
        if color != self.state_color:
            self.state_color = color
            self._color_state()

    def show_memory(self, line: str, users: Sequence[MemoryUser], total: int | None) -> None:
        """Show the memory of each user. A full bar represents `total` bytes, or the sum of all users if `total` is
        None.
        """
        _set_text(self.memory, f"Memory {line}")
        used = sum(user.num_bytes for user in users)
        _set_text(self.share, percent(used / total, 0) if total and users else "")
        self._memory = tuple(users), total
        self._show_bar()
        self.bar.setAccessibleName(f"Memory of {self.title.text()}")

    def show_figures(self, figures: Sequence[DeviceFigure]) -> None:
        """Show the figures. The rows are recreated if the names of the figures changed."""
        if [figure.name for figure in figures] != list(self._figures):
            self._make_figures(figures)
        for figure in figures:
            value = self._figures[figure.name][1]
            _set_text(value, figure.value)
            set_look(value, "warning" if figure.is_bad else "muted" if figure.value == UNKNOWN else "")

    def value(self, name: str) -> str:
        return self._figures[name][1].text()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.bar.set_colors(theme.raised, theme.panel)
        self._show_bar()
        self._color_state()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange_figures()

    def _show_bar(self) -> None:
        users, total = self._memory
        full = max(total or 0, sum(user.num_bytes for user in users), 1)
        self.bar.show_segments(
            [
                BarSegment(
                    user.num_bytes / full,
                    process_color(user.color_index, self._theme),
                    f"{user.label}: {num_bytes(user.num_bytes)}",
                )
                for user in users
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
        for figure in figures:
            name, value = label(figure.name, "muted"), label(wraps=True, elastic=True)
            name.setAlignment(Qt.AlignmentFlag.AlignTop)
            for widget in (name, value):
                widget.setToolTip(figure.meaning)
            self._figures[figure.name] = name, value
        self._num_columns = 0
        self._arrange_figures()

    def _arrange_figures(self) -> None:
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


def _set_text(text_label: QLabel, text: str) -> None:
    if text_label.text() != text:
        text_label.setText(text)
