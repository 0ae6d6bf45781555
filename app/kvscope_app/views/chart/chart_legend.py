"""Legend above a plot: its title, and the name and value of each curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled

_GAP = 12
_MAX_UNNAMED: Final = 2
"""Maximum number of curves that lose their names if space is short. With more curves, the values are hidden instead."""
_SWATCH = 8
_TIME_ALIGNMENT: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_TITLE_SHARE: Final = 0.6
"""Fraction of the title's width that must be visible before the names of curves get space."""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """Entry of a curve in the legend. `name` is the curve's key in the shown values; `label` is empty if the
    title suffices.
    """

    name: str
    label: str
    dashed: bool = False


class ChartLegend(QWidget):
    """Legend with a title, and the name and value of each curve.

    Painted instead of composed of labels, because values change ten times per second and must not move the layout.
    """

    changed = Signal()

    def __init__(self, title: str, entries: Sequence[LegendEntry]) -> None:
        super().__init__()
        self._title = title
        self._entries = tuple(entries)
        self._values: dict[str, str] = {}
        self._time_text = ""
        self._is_read = False
        self._colors: dict[str, str] = {}
        self._theme = DARK
        self._tip = ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def explain(self, tip: str) -> None:
        """Set the explanation that the tooltip shows below the values."""
        self._tip = tip
        self.setToolTip(tip)

    @property
    def values(self) -> Mapping[str, str]:
        return self._values

    @property
    def time_text(self) -> str:
        """Time of the values: "current", "last 10 s", or the time of day at the pointer."""
        return self._time_text

    @property
    def description(self) -> str:
        values = ", ".join(f"{e.label} {self._values.get(e.name, '')}".strip() for e in self._entries)
        return f"{values} ({self._time_text})" if self._time_text and not self._is_read else values

    def set_values(self, values: Mapping[str, str], time_text: str = "", *, is_read: bool = False) -> None:
        """Show `values`, by curve name, with `time_text` next to the title.

        `is_read` says whether the values are those at the pointer. In that case, the title is elided if `time_text`
        needs the space.
        """
        if values != self._values or time_text != self._time_text:
            self._values, self._time_text, self._is_read = dict(values), time_text, is_read
            description = self.description
            self.changed.emit()
            self.setAccessibleDescription(description)
            if self._tip:
                self.setToolTip(f"{description}.\n{self._tip}")
            self.update()

    def apply_theme(self, theme: Theme, colors: Mapping[str, str]) -> None:
        self._theme = theme
        self._colors = dict(colors)
        self.update()

    @property
    def missing_width(self) -> int:
        """Pixels by which the legend is too narrow for its title, all names and all values; 0 if everything fits."""
        return max(0, ceil(self._width(with_labels=True, title_share=1.0)) - (self.width() - 14))

    def sizeHint(self) -> QSize:
        return QSize(200, round(QFontMetricsF(_value_font()).height()) + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        right = self.width() - 6.0
        with_labels = self._width(with_labels=True) <= self.width() - 12
        # Without space for both: up to two curves show their values, more curves their names.
        with_values = with_labels or len(self._entries) <= _MAX_UNNAMED
        for entry in reversed(self._entries):
            right = self._paint_entry(painter, entry, right, with_labels or not with_values, with_values) - scaled(_GAP)
        painter.setFont(sans(1.0, QFont.Weight.DemiBold))
        painter.setPen(QColor(self._theme.muted))
        box = QRectF(8, 0, max(right - 8, 0), self.height())
        reserved = QFontMetricsF(sans(0.92)).horizontalAdvance(self._time_text) + 7 if self._is_read else 0.0
        title_width = max(round(box.width() - reserved), 0)
        title = painter.fontMetrics().elidedText(self._title, Qt.TextElideMode.ElideRight, title_width)
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, title)
        left = box.left() + painter.fontMetrics().horizontalAdvance(title) + 6
        painter.setFont(sans(0.92))
        if left + painter.fontMetrics().horizontalAdvance(self._time_text) <= box.right():
            painter.drawText(QRectF(left, 0, box.right() - left, self.height()), _TIME_ALIGNMENT, self._time_text)
        painter.end()

    def _paint_entry(
        self, painter: QPainter, entry: LegendEntry, right: float, with_labels: bool, with_values: bool
    ) -> float:
        value = self._values.get(entry.name, "") if with_values else ""
        right = self._paint_text(painter, value, right, _value_font(), self._theme.text)
        if with_labels and entry.label:
            right = self._paint_text(painter, entry.label, right - 5, sans(0.92), self._theme.muted)
        swatch = QRectF(
            right - 5 - scaled(_SWATCH), (self.height() - scaled(_SWATCH)) / 2, scaled(_SWATCH), scaled(_SWATCH)
        )
        color = QColor(self._colors.get(entry.name, self._theme.muted))
        painter.setPen(Qt.PenStyle.NoPen)
        if entry.dashed:
            for dash in _dashes(swatch):
                painter.fillRect(dash, color)
        else:
            painter.setBrush(color)
            painter.drawRoundedRect(swatch, 2, 2)
        return swatch.left()

    def _paint_text(self, painter: QPainter, text: str, right: float, font: QFont, color: str) -> float:
        width = QFontMetricsF(font).horizontalAdvance(text)
        painter.setFont(font)
        painter.setPen(QColor(color))
        painter.drawText(QRectF(right - width - 1, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter, text)
        return right - width

    def _width(self, *, with_labels: bool, title_share: float = _TITLE_SHARE) -> float:
        values, labels = QFontMetricsF(_value_font()), QFontMetricsF(sans(0.92))
        total = title_share * QFontMetricsF(sans(1.0, QFont.Weight.DemiBold)).horizontalAdvance(self._title)
        for entry in self._entries:
            total += scaled(_GAP) + scaled(_SWATCH) + 5 + values.horizontalAdvance(self._values.get(entry.name, ""))
            total += 5 + labels.horizontalAdvance(entry.label) if with_labels and entry.label else 0
        return total


def _dashes(swatch: QRectF) -> tuple[QRectF, QRectF]:
    dash = QRectF(swatch.left() - 3, swatch.center().y() - 1, 5, 2)
    return dash, dash.translated(7, 0)


def _value_font() -> QFont:
    return sans(1.2, QFont.Weight.DemiBold)
