"""Lane of bookmarks and alarms, and the markers of the playback loop across all lanes. Must not depend on the
session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import QPainter

from kvscope_app.session.mark_labels import name_of
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.mark_signs import WIDTH, paint_loop, paint_sign, sign_color
from kvscope_app.ui.theme import Theme
from kvscope_app.views.timeline.lane_layout import MARKS, LaneLayout, axis_height, gutter
from kvscope_telemetry.summaries.bookmark import Bookmark

_MIN_SIGN_SPACING_PX: Final = 3.0
_MIN_TEXT_PX: Final = 30


@dataclass(frozen=True, slots=True)
class LaneMarks:
    """Bookmarks and alarms in order of time, and the (start, end) of the playback loop in ns, each None if not set."""

    bookmarks: Sequence[Bookmark] = ()
    loop: tuple[int | None, int | None] = (None, None)

    def nearest(self, time_ns: int, reach_ns: int) -> Bookmark | None:
        """Return the bookmark nearest to `time_ns`, or None if it is further away than twice `reach_ns`. An alarm
        covers its whole duration.
        """
        best = min(self.bookmarks, key=lambda mark: _distance_ns(mark, time_ns), default=None)
        return best if best is not None and _distance_ns(best, time_ns) <= 2 * reach_ns else None


def paint_marks(painter: QPainter, marks: LaneMarks, span: TimeSpan, layout: LaneLayout, theme: Theme) -> None:
    box = QRectF(gutter(), axis_height(), layout.chart_width, layout.height - axis_height())
    left, right = (None if time_ns is None else _x(time_ns, span, layout) for time_ns in marks.loop)
    paint_loop(painter, left, right, box, theme)
    top, height = next(((top, height) for lane, top, height in layout.boxes() if lane.name == MARKS), (0, 0))
    if not height:
        return
    painter.save()
    painter.setClipRect(QRect(gutter(), top, layout.chart_width, height))
    visible = [mark for mark in marks.bookmarks if max(mark.until_ns, mark.time_ns) >= span.begin_ns]
    visible = [mark for mark in visible if mark.time_ns <= span.end_ns]
    for mark in visible:
        if mark.until_ns:
            begin, end = (_x(time_ns, span, layout) for time_ns in (mark.time_ns, mark.until_ns))
            painter.fillRect(
                QRectF(begin, top + height - 3, max(end - begin, 2), 3), sign_color(mark.is_user_note, theme)
            )
    previous_x = -_MIN_SIGN_SPACING_PX
    for index, mark in enumerate(visible):
        x = _x(mark.time_ns, span, layout)
        if x - previous_x < _MIN_SIGN_SPACING_PX:
            continue
        previous_x = x
        paint_sign(painter, x, top + 2, height - 5, is_note=mark.is_user_note, theme=theme)
        next_x = _x(visible[index + 1].time_ns, span, layout) if index + 1 < len(visible) else layout.width
        _paint_text(painter, mark, QRectF(x + WIDTH, top, next_x - x - 1.6 * WIDTH, height - 2), theme)
    painter.restore()


def _paint_text(painter: QPainter, mark: Bookmark, box: QRectF, theme: Theme) -> None:
    if box.width() < _MIN_TEXT_PX or (mark.is_user_note and not mark.text):
        return
    painter.setPen(theme.color("text"))
    text = painter.fontMetrics().elidedText(name_of(mark), Qt.TextElideMode.ElideRight, int(box.width()))
    painter.drawText(box, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)


def _x(time_ns: int, span: TimeSpan, layout: LaneLayout) -> float:
    return gutter() + span.share_at(time_ns) * layout.chart_width


def _distance_ns(mark: Bookmark, time_ns: int) -> int:
    return max(mark.time_ns - time_ns, time_ns - max(mark.until_ns, mark.time_ns), 0)
