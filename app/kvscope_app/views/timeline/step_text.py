"""Paints text and outlines over the lanes: labels of steps, and outlines of the requests in a step."""

from __future__ import annotations

from typing import Final

import numpy as np
from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import QPainter, QPen

from kvscope_app.ui.number_text import count, seconds
from kvscope_app.ui.theme import Theme
from kvscope_app.views.timeline.lane_layout import STEPS, LaneLayout, axis_height, gutter, row_height
from kvscope_app.views.timeline.lane_picture import ShownLanes
from kvscope_app.views.timeline.steps import StepColumns

_MIN_LABEL_WIDTH_PX: Final = 46
_MAX_LABELS: Final = 200


def paint(
    painter: QPainter,
    shown: ShownLanes,
    layout: LaneLayout,
    theme: Theme,
    pointed: int | None,
    batch: tuple[int, tuple[int, ...]],
) -> None:
    """Paint labels and highlights.

    `pointed`: index of the step under the mouse pointer, None if there is none; `batch`: epoch and numbers of the
    selected requests.
    """
    steps = shown.steps
    painter.save()
    painter.setClipRect(QRect(gutter(), axis_height(), layout.chart_width, layout.height))
    if steps is not None and len(steps):
        _paint_labels(painter, steps, shown, layout, theme)
        if pointed is not None and pointed < len(steps):
            _paint_band(painter, steps, pointed, shown, layout, theme)
            numbers = steps.batch(pointed).numbers.tolist()
            _paint_outlines(painter, int(steps.epoch[pointed]), numbers, shown, layout, theme)
    if batch[1]:
        _paint_outlines(painter, batch[0], batch[1], shown, layout, theme)
    painter.restore()


def _paint_labels(painter: QPainter, steps: StepColumns, shown: ShownLanes, layout: LaneLayout, theme: Theme) -> None:
    top, height = next(((top, height) for lane, top, height in layout.boxes() if lane.name == STEPS), (0, 0))
    if not height:  # the lane appears only with the first complete second, after the first steps were read
        return
    visible = steps.within(shown.span.begin_ns, shown.span.end_ns)
    if visible.stop - visible.start > _MAX_LABELS:
        return
    for index in range(visible.start, visible.stop):
        left, right = (_x(int(time_ns), shown, layout) for time_ns in (steps.begin_ns[index], steps.end_ns[index]))
        left, right = max(left, gutter()), min(right, gutter() + layout.chart_width)
        if right - left < _MIN_LABEL_WIDTH_PX:
            continue
        metrics = painter.fontMetrics()
        texts = _label_texts(steps, index)
        text = next((text for text in texts if metrics.horizontalAdvance(text) + 8 <= right - left), texts[-1])
        width = metrics.horizontalAdvance(text) + 6
        if width + 2 > right - left:
            continue
        chip = QRectF(left + 2, top + 1, width, min(metrics.height(), height - 2))
        painter.fillRect(chip, theme.color("raised", 225))
        painter.setPen(theme.color("text"))
        painter.drawText(chip, Qt.AlignmentFlag.AlignCenter, text)


def _label_texts(steps: StepColumns, index: int) -> tuple[str, ...]:
    tokens = f"{count(int(steps.prefill[index] + steps.decode[index]))} tok"
    requests = f"{count(steps.batch(index).numbers.size)} req · {tokens}"
    return f"{requests} · {seconds(float(steps.end_ns[index] - steps.begin_ns[index]) / 1e9)}", requests, tokens


def _paint_band(
    painter: QPainter, steps: StepColumns, index: int, shown: ShownLanes, layout: LaneLayout, theme: Theme
) -> None:
    left, right = (_x(int(time_ns), shown, layout) for time_ns in (steps.begin_ns[index], steps.end_ns[index]))
    band = QRectF(left, axis_height(), max(right - left, 1.0), layout.height - axis_height())
    painter.fillRect(band, theme.color("selection", 34))
    painter.setPen(QPen(theme.color("selection", 150), 1))
    painter.drawRect(band)


def _paint_outlines(
    painter: QPainter,
    epoch: int,
    numbers: tuple[int, ...] | list[int],
    shown: ShownLanes,
    layout: LaneLayout,
    theme: Theme,
) -> None:
    requests, span = shown.lanes.requests, shown.span
    painter.setPen(QPen(theme.color("selection"), 1))
    for number in numbers:
        request = shown.lanes.index_of(epoch, number)
        if request is None or request >= shown.rows.size or shown.rows[request] < 0:
            continue
        row = int(shown.rows[request]) - shown.first_row
        if not 0 <= row <= layout.num_rows:
            continue
        begin, end = (int(np.clip(requests[name][request], span.begin_ns, span.end_ns)) for name in ("begin", "end"))
        left, right = _x(begin, shown, layout), _x(min(end, max(shown.until_ns, begin)), shown, layout)
        top = layout.requests_top + row * row_height()
        painter.drawRect(QRectF(left, top - 1, max(right - left - 1, 2), row_height() - 2))


def _x(time_ns: int, shown: ShownLanes, layout: LaneLayout) -> float:
    return gutter() + shown.span.share_at(time_ns) * layout.chart_width
