"""One run of a comparison: its letter, name, engine, shown time and page map.

Owns the field for the shown time. Must not depend on the other run.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QColor, QFont, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from kvscope_app.compare.session_pair import PairSide
from kvscope_app.session.session import Session
from kvscope_app.ui.fonts import sans
from kvscope_app.ui.model_name import model_name
from kvscope_app.ui.number_fields import NumberBox
from kvscope_app.ui.number_text import count, percent
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import set_look
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.chart.panel import CurveSpec
from kvscope_app.views.page_map.page_map_view import PageMapView

_BEFORE: Final = "before the start of this recording"
_AFTER: Final = "after the end of this recording"
_NOT_YET: Final = "not recorded yet"


class RunLetter(QWidget):
    """Letter A or B, framed in the colour and line style of its curves."""

    def __init__(self, curve: CurveSpec) -> None:
        super().__init__()
        self._curve, self._theme = curve, DARK
        self.setFixedSize(scaled(24), scaled(22))

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        color = QColor(self._curve.color_of(self._theme))
        painter.setPen(QPen(color, 2, Qt.PenStyle.DotLine if self._curve.dashed else Qt.PenStyle.SolidLine))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(1.5, 1.5, -1.5, -1.5), 4, 4)
        painter.setPen(color)
        painter.setFont(sans(1.0, QFont.Weight.Bold))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, self._curve.label)
        painter.end()


class SideView(QWidget):
    """Header and page map of one run. `name` is the file name or the label of a live engine."""

    moment_chosen = Signal(float)
    """Emitted when the user edits the time field, with the new time in seconds since this run's start.

    The receiver aligns the runs so that this time is next to the time that the other run shows.
    """

    def __init__(self, session: Session, name: str, curve: CurveSpec) -> None:
        super().__init__()
        self.session = session
        self._curve = curve
        self.setAccessibleName(f"Run {curve.label}: {name}")
        self._letter = RunLetter(curve)
        self._name = ElidedLabel(name)
        self._name.setProperty("look", "heading")
        self._status = ElidedLabel()
        self._status.setProperty("look", "muted")
        self.moment = NumberBox()
        self._set_up_moment()
        self.map = PageMapView(session)
        self._build()

    def show_at(self, side: PairSide, at_ns: int) -> None:
        range_ns = self.session.timeline.range_ns
        if range_ns is None:
            return
        length_s = (range_ns[1] - range_ns[0]) / 1e9
        if not self.moment.lineEdit().isModified():  # the user is typing in it
            self.moment.blockSignals(True)
            self.moment.setMaximum(round(length_s, 1))
            self.moment.setValue((self.session.timeline.cursor_ns - range_ns[0]) / 1e9)
            self.moment.blockSignals(False)
        self._show_status(side, at_ns)

    def apply_theme(self, theme: Theme) -> None:
        self.map.apply_theme(theme)
        self._letter.apply_theme(theme)

    def _show_status(self, side: PairSide, at_ns: int) -> None:
        share = self.session.overview_share
        if share is not None:
            text, look = f"reading its overview: {percent(share, 0)}", "muted"
        elif not side.contains(at_ns):
            text, look = self._absence_text(side, at_ns), "warning"
        else:
            text, look = self._title(), "muted"
        if self._status.text() != text:
            self._status.setText(text)
            set_look(self._status, look)

    def _absence_text(self, side: PairSide, at_ns: int) -> str:
        if at_ns < side.range_ns[0]:
            return _BEFORE
        player = self.session.timeline.player
        return _NOT_YET if player is not None and player.recording.may_grow else _AFTER

    def _title(self) -> str:
        hello = self.session.live_mirror.hello
        if hello is None:
            return ""
        cache = hello.cache
        pool = f"{count(cache.num_blocks)} blocks of {cache.block_size}"
        player = self.session.timeline.player
        note = "" if player is None else player.damage_summary
        return " · ".join(filter(None, (model_name(hello), pool, cache.allocator, note)))

    def _set_up_moment(self) -> None:
        self.moment.setDecimals(1)
        self.moment.setSuffix(" s")
        self.moment.setMaximum(0.0)
        self.moment.setKeyboardTracking(False)
        self.moment.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.moment.setAccessibleName(f"Moment of {self._curve.label}")
        self.moment.setToolTip(
            f"Seconds since the start of {self._curve.label}. Change the number to align this run with what the other "
            "run shows"
        )
        self.moment.valueChanged.connect(self.moment_chosen)
        self.moment.editingFinished.connect(self._return_focus)

    def _return_focus(self) -> None:
        if self.moment.hasFocus():
            self.map.canvas.setFocus()

    def _build(self) -> None:
        row = QHBoxLayout()
        row.setContentsMargins(14, 8, 14, 0)
        row.setSpacing(8)
        row.addWidget(self._letter)
        row.addWidget(self._name, 2)
        row.addWidget(self._status, 3)
        row.addWidget(self.moment)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addLayout(row)
        column.addWidget(self.map, 1)
