"""The four curves around the heatmap: how much is lost to either kind of fragmentation, and the free runs behind it.

Owns which curves there are and what each shows of a course. Must not know where they stand.
"""

from __future__ import annotations

from kvscope_app.look.number_text import count, percent, plural
from kvscope_app.views.heatmap.measures import internal
from kvscope_app.views.heatmap.pools import Pools
from kvscope_app.views.heatmap.strips import CurveStrip
from kvscope_app.views.heatmap.time_frame import TimeFrame
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.figures import fragmentation_of


class LossStrips:
    """On one time frame."""

    def __init__(self, frame: TimeFrame) -> None:
        self.external = _share_strip(
            frame, "External fragmentation", "The share of the free blocks that is not in the longest free run", 1
        )
        self.longest = CurveStrip(
            frame,
            "Longest free run",
            "Blocks, one after another, that hold nothing",
            0,
            lambda v: plural(round(v), "block"),
            count,
        )
        self.number = CurveStrip(frame, "Free runs", "How many stretches of free blocks there are", 2, count, count)
        self.internal = _share_strip(
            frame, "Internal fragmentation", "The share of the slots of active blocks that hold no token", 3
        )
        self.all = (self.external, self.longest, self.number, self.internal)
        self._shown: tuple[Course, int, int] | None = None

    def show_course(self, course: Course, pools: Pools, num_addresses: int) -> None:
        """All of `course`, unless nothing is new in it."""
        version = (course, course.version, num_addresses)
        if version == self._shown:
            return
        self._shown = version
        self.external.show_values(course.time_ns, fragmentation_of(course))
        self.longest.show_values(course.time_ns, course.column("longest_free_run"))
        self.number.show_values(course.time_ns, course.column("num_free_runs"))
        self.internal.show_values(course.time_ns, internal(course, pools))


def _share_strip(frame: TimeFrame, title: str, tip: str, series: int) -> CurveStrip:
    return CurveStrip(frame, title, tip, series, percent, lambda share: percent(share, 0), top=1.0)
