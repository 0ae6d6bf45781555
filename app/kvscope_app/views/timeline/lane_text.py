"""Paints the text over the picture of the lanes (lane names, axis, legend, request numbers), and the outline of the
selected request.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QColor, QPainter, QPen

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import Theme, mix, owner_color
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.timeline.lane_colors import (
    PHASE_COLORS,
    PHASE_LEGEND,
    QUEUED_PALENESS,
    STOPPED_COLOR,
    STOPPED_LABEL,
    STOPPED_PALENESS,
)
from kvscope_app.views.timeline.lane_layout import LaneLayout, axis_height, gutter, row_height
from kvscope_app.views.timeline.lane_picture import ShownLanes, peak_requests
from kvscope_app.views.timeline.mark_lane import paint_marks
from kvscope_app.views.timeline.request_lanes import OPEN_NS
from kvscope_app.views.timeline.time_axis import axis_times
from kvscope_telemetry.request_phase import RequestPhase

_TIME_LABEL_SPACING_PX: Final = 90
_MIN_NAMED_WIDTH_PX: Final = 34
_MAX_NAMED: Final = 300
_OWNER_WIDTH_PX: Final = 4
_ALIGN_LEFT: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


def paint(
    painter: QPainter, shown: ShownLanes, layout: LaneLayout, theme: Theme, selected: tuple[int, int] | None
) -> None:
    painter.setFont(sans(0.86))
    _paint_axis(painter, shown, layout, theme)
    _paint_lane_names(painter, shown, layout, theme)
    _paint_requests(painter, shown, layout, theme, selected)
    paint_marks(painter, shown.marks, shown.span, layout, theme)


def _paint_axis(painter: QPainter, shown: ShownLanes, layout: LaneLayout, theme: Theme) -> None:
    for time_ns, text in axis_times(shown.span, layout.chart_width, scaled(_TIME_LABEL_SPACING_PX)):
        x = gutter() + round(shown.span.share_at(time_ns) * layout.chart_width)
        painter.fillRect(x, axis_height() - 5, 1, 5, theme.color("muted"))
        painter.setPen(theme.color("muted"))
        width = painter.fontMetrics().horizontalAdvance(text)
        left = min(max(x - width // 2, gutter()), layout.width - width)
        painter.drawText(QRect(left, 0, width + 1, axis_height() - 5), Qt.AlignmentFlag.AlignCenter, text)


def _paint_lane_names(painter: QPainter, shown: ShownLanes, layout: LaneLayout, theme: Theme) -> None:
    right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
    painter.setPen(theme.color("muted"))
    for lane, top, height in layout.boxes():
        peak_text = ""
        if lane.name in ("running", "waiting") and len(shown.overview):
            peak = peak_requests(shown.overview, lane.name)
            peak_text = f" ≤ {count(peak)}" if peak > 0 else ""
        painter.drawText(QRect(0, top - 2, gutter() - 8, height + 4), right, lane.title + peak_text)
    top = layout.legend_top
    painter.drawText(QRect(0, top, gutter() - 8, row_height()), right, "Requests")
    painter.fillRect(0, top - 4, layout.width, 1, theme.color("border"))
    if layout.has_legend:
        _paint_legend(painter, layout, theme, has_stops=len(shown.overview.stops) > 0)


def _paint_legend(painter: QPainter, layout: LaneLayout, theme: Theme, *, has_stops: bool) -> None:
    x, middle, spacing = gutter(), layout.legend_top + row_height() // 2 - 1, scaled(14)
    entries = [
        (text, PHASE_COLORS[phase], QUEUED_PALENESS if is_thin else 0.0, is_thin)
        for phase, text in PHASE_LEGEND.items()
        for is_thin in (phase is RequestPhase.QUEUED,)
    ]
    if has_stops:
        entries.append((STOPPED_LABEL, STOPPED_COLOR, STOPPED_PALENESS, False))
    for text, name, paleness, is_thin in entries:
        width = painter.fontMetrics().horizontalAdvance(text)
        if x + spacing + width > layout.width:
            return
        color = mix(str(getattr(theme, name)), theme.base, paleness)
        height = scaled(3 if is_thin else 8)
        painter.fillRect(QRect(x, middle - height // 2, scaled(10), height), QColor(color))
        painter.drawText(QRect(x + spacing, layout.legend_top - 2, width + 2, row_height()), _ALIGN_LEFT, text)
        x += spacing + width + spacing


def _paint_requests(
    painter: QPainter, shown: ShownLanes, layout: LaneLayout, theme: Theme, selected: tuple[int, int] | None
) -> None:
    requests, span = shown.lanes.requests, shown.span
    ends = np.where(requests["end"] == OPEN_NS, max(shown.until_ns, span.begin_ns), requests["end"])
    rows = shown.rows - shown.first_row
    scale = layout.chart_width / span.length_ns
    first = (requests["begin"].clip(span.begin_ns - span.length_ns) - span.begin_ns) * scale
    last = (ends.clip(max=span.end_ns + span.length_ns) - span.begin_ns) * scale
    left, right = first.clip(0, layout.chart_width), last.clip(0, layout.chart_width)
    is_visible = (shown.rows >= 0) & (rows >= 0) & (rows <= layout.num_rows)
    is_visible &= (last >= 0) & (first <= layout.chart_width)
    painter.save()
    painter.setClipRect(QRect(gutter(), layout.requests_top - 2, layout.chart_width, layout.height))
    for index in np.flatnonzero(is_visible & (right - left >= _MIN_NAMED_WIDTH_PX))[:_MAX_NAMED].tolist():
        box = _request_rect(layout, int(rows[index]), float(left[index]), float(right[index]))
        _paint_number(painter, box, int(requests["number"][index]), theme)
    if selected is not None and (request := shown.lanes.index_of(*selected)) is not None and is_visible[request]:
        painter.setPen(QPen(theme.color("selection"), 2))
        painter.drawRect(_request_rect(layout, int(rows[request]), float(first[request]) - 1, float(last[request]) + 1))
    painter.restore()


def _request_rect(layout: LaneLayout, row: int, left: float, right: float) -> QRect:
    top = layout.requests_top + row * row_height()
    return QRect(gutter() + round(left), top, max(round(right - left), 3), row_height() - 3)


def _paint_number(painter: QPainter, box: QRect, number: int, theme: Theme) -> None:
    painter.fillRect(QRect(box.left(), box.top(), _OWNER_WIDTH_PX, box.height()), owner_color(number, theme))
    text = f"#{number}"
    width = painter.fontMetrics().horizontalAdvance(text)
    if width + 2 * _OWNER_WIDTH_PX + 6 <= box.width():
        chip = QRect(box.left() + _OWNER_WIDTH_PX, box.top(), width + 6, box.height())
        painter.fillRect(chip, theme.color("raised"))
        painter.setPen(theme.color("text"))
        painter.drawText(chip.adjusted(3, 0, 0, 0), Qt.AlignmentFlag.AlignVCenter, text)
