"""Strip with the phases of a step: scheduling, forward pass, rest of the run, commit."""

from __future__ import annotations

from typing import Final, NamedTuple

from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from kvscope_app.ui.number_text import seconds
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme, readable_on
from kvscope_app.ui.zoom import scaled

_HEIGHT: Final = 22
_MARGIN: Final = 10
_MIN_WIDTH_PX: Final = 1.0


class StripPhase(NamedTuple):
    name: str
    time_ns: int
    color: int


class PhaseStrip(QWidget):
    """Phases side by side, as wide as their share of the time, with labels where they fit and tooltips."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.phases: tuple[StripPhase, ...] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def show_phases(self, phases: tuple[StripPhase, ...]) -> None:
        """Show `phases` in order, without phases of 0 ns. The strip is hidden if none remains."""
        shown = tuple(phase for phase in phases if phase.time_ns > 0)
        self.setVisible(bool(shown))
        if shown != self.phases:
            self.phases = shown
            self.setAccessibleName("Time spent: " + ", ".join(map(_phase_text, shown)))
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        self.theme = theme
        self.update()

    def boxes(self) -> list[tuple[StripPhase, QRectF]]:
        left, width = float(scaled(_MARGIN)), self.width() - 2.0 * scaled(_MARGIN)
        total = sum(phase.time_ns for phase in self.phases)
        boxes = []
        for phase in self.phases:
            phase_width = width * phase.time_ns / total
            boxes.append((phase, QRectF(left, 2, max(phase_width, _MIN_WIDTH_PX), self.height() - 6)))
            left += phase_width
        return boxes

    def sizeHint(self) -> QSize:
        return QSize(scaled(200), scaled(_HEIGHT) + 4)

    def minimumSizeHint(self) -> QSize:
        return QSize(scaled(60), scaled(_HEIGHT) + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        for phase, box in self.boxes():
            color = self.theme.series[phase.color]
            painter.fillRect(box, self.theme.color("base"))
            painter.fillRect(box.adjusted(0, 0, -1 if box.width() > 2 else 0, 0), color)
            text = next((t for t in (_phase_text(phase), phase.name) if self._fits(t, box)), "")
            painter.setPen(readable_on(color, self.theme))
            painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)
        painter.end()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            pointed = next((phase for phase, box in self.boxes() if box.contains(event.pos())), None)
            QToolTip.showText(event.globalPos(), plain_tip(_phase_text(pointed)) if pointed is not None else "", self)
            return True
        return super().event(event)

    def _fits(self, text: str, box: QRectF) -> bool:
        return self.fontMetrics().horizontalAdvance(text) + 8 <= box.width()


def _phase_text(phase: StripPhase) -> str:
    return f"{phase.name} {seconds(phase.time_ns / 1e9)}"
