"""The pool over time as a picture: time across, address down, colour by what blocks hold."""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.exports.report.charts import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    TOP,
    TimeAxis,
    frame,
    mark_lines,
    svg,
)
from kvscope_telemetry.exports.report.inks import DARK, LIGHT, rgb
from kvscope_telemetry.exports.report.png import png
from kvscope_telemetry.summaries.course import Course
from kvscope_telemetry.summaries.summary import SECOND_NS

HEIGHT: Final = 250
_MAX_COLUMNS: Final = 480
_MAX_ROWS: Final = 256


def heatmap(course: Course, axis: TimeAxis, start_ns: int) -> str:
    """SVG with the picture inside; empty where the course has no bins."""
    seconds = max(1, round(axis.until_s - axis.from_s))
    num_columns = min(_MAX_COLUMNS, seconds)
    middles = axis.from_s + (np.arange(num_columns) + 0.5) * (axis.until_s - axis.from_s) / num_columns
    places = np.array([_place(course, start_ns + round(at_s * 1e9)) for at_s in middles.tolist()], np.int64)
    active, cached = course.bins("active", places), course.bins("cached", places)
    if not active.size:
        return ""
    active, cached = _fewer(active), _fewer(cached)
    num_rows = int(course.column("num_rows")[places.max(initial=0)])
    height = HEIGHT - TOP - BOTTOM
    place = f'x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{height}"'
    picture = "".join(
        f'<image class="{css}" href="data:image/png;base64,{_encoded(_pixels(active, cached, colors))}" {place}'
        ' preserveAspectRatio="none" style="image-rendering:pixelated"/>'
        for css, colors in (("if-light", LIGHT), ("if-dark", DARK))
    )
    labels = "".join(
        f'<text class="label end" x="{LEFT - 6}" y="{y}">{text}</text>'
        for y, text in ((TOP + 10, "block 0"), (TOP + height, f"{max(0, num_rows - 1):,}"))
    )
    words = "Blocks over time, by address: held by requests, cached, free"
    return svg(HEIGHT, words, frame(axis, HEIGHT) + picture + labels + mark_lines(axis, HEIGHT))


def _place(course: Course, time_ns: int) -> int:
    """Of the second at `time_ns`, -1 in a silence."""
    place = course.place_at(time_ns)
    return place if place >= 0 and time_ns - int(course.time_ns[place]) < 2 * SECOND_NS else -1


def _fewer(shares: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Shape (columns, rows): bins put together until they are few; shares 0 to 1."""
    values = shares.astype(np.float64) / 255
    if values.shape[1] <= _MAX_ROWS:
        return values
    edges = np.arange(_MAX_ROWS) * values.shape[1] // _MAX_ROWS
    sizes = np.diff(np.append(edges, values.shape[1]))
    put_together: npt.NDArray[np.float64] = np.add.reduceat(values, edges, axis=1) / sizes
    return put_together


def _encoded(pixels: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(png(pixels)).decode("ascii")


def _pixels(
    active: npt.NDArray[np.float64], cached: npt.NDArray[np.float64], colors: dict[str, str]
) -> npt.NDArray[np.uint8]:
    """Colour by the greater part, opacity by how much there is at all; free is the page's ground."""
    total = np.clip(active + cached, 0, 1)
    part = np.divide(active, active + cached, out=np.zeros_like(active), where=total > 0)[..., None]
    colour = part * np.array(rgb(colors["active"])) + (1 - part) * np.array(rgb(colors["cached"]))
    pixels = np.concatenate((colour, 255 * np.sqrt(total)[..., None]), axis=2)
    rounded: npt.NDArray[np.uint8] = np.round(pixels).astype(np.uint8).transpose(1, 0, 2)
    return rounded
