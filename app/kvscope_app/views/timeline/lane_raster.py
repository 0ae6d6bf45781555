"""Conversion of times to pixel columns, and of columns to pixels, with numpy. Imports no Qt.

`edges` are the times between columns, shape (columns + 1,), int64 ns. Pixels are 0xAARRGGBB, shape (height, columns).
Drawing time depends on the number of pixels, not of events.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_app.session.time_span import TimeSpan
from kvscope_telemetry.summaries.summary import SECOND_NS

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint32]


def column_edges(span: TimeSpan, num_columns: int) -> IntArray:
    offsets = np.linspace(0, span.length_ns, num_columns + 1)
    edges: IntArray = span.begin_ns + np.round(offsets).astype(np.int64)
    return edges


def seconds_in(time_ns: IntArray, edges: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for each column, the first index and one past the last index of the seconds that overlap it; shape
    (columns,) each.
    """
    first = np.searchsorted(time_ns, edges[:-1] - SECOND_NS, "right")
    last = np.searchsorted(time_ns, edges[1:], "left")
    return first, np.maximum(last, first)


def min_and_max(values: FloatArray, first: IntArray, last: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the minimum and maximum over the seconds in each column, shape (columns,) each; NaN for columns without
    data.
    """
    has_data = last > first
    low, high = np.full(first.size, np.nan), np.full(first.size, np.nan)
    if has_data.any():
        pairs = np.column_stack((first[has_data], last[has_data])).ravel()
        padded = np.append(values, values[-1])  # reduceat needs the end of the last pair to be a valid index
        low[has_data] = np.minimum.reduceat(padded, pairs)[::2]
        high[has_data] = np.maximum.reduceat(padded, pairs)[::2]
    return low, high


def sums(values: FloatArray, first: IntArray, last: IntArray) -> FloatArray:
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(values))))
    column_sums: FloatArray = total[last] - total[first]
    return column_sums


def moments(time_ns: IntArray, edges: IntArray) -> FloatArray:
    """Return how many of `time_ns` fall into each column, shape (columns,). `time_ns` must be ascending."""
    indices = np.searchsorted(time_ns, edges, "left")
    return np.diff(indices).astype(np.float64)


def covered(begin_ns: IntArray, end_ns: IntArray, edges: IntArray) -> npt.NDArray[np.bool_]:
    """Return a mask of the columns that overlap any span, shape (columns,). Spans must be ascending and disjoint."""
    num_begun = np.searchsorted(begin_ns, edges[1:], "left")
    num_ended = np.searchsorted(end_ns, edges[:-1], "right")
    is_covered: npt.NDArray[np.bool_] = num_begun > num_ended
    return is_covered


def fill_below(pixels: Pixels, heights: FloatArray, color: int) -> None:
    """Fill each column from the bottom up to its share of the height (0 to 1); NaN leaves it unchanged."""
    rows = pixels.shape[0]
    tops = np.rint(np.nan_to_num(heights).clip(0, 1) * rows)
    tops[np.nan_to_num(heights) > 0] = np.maximum(tops[np.nan_to_num(heights) > 0], 1)
    from_bottom = np.arange(rows, 0, -1)[:, None]
    pixels[from_bottom <= tops[None, :]] = color


def draw_ticks(pixels: Pixels, counts: FloatArray, color: int) -> None:
    """Draw a tick in each column with a count above 0. Tick heights are logarithmic; the largest count has the full
    height.
    """
    max_count = counts.max(initial=0.0)
    if max_count <= 0:
        return
    heights = np.where(counts > 0, 0.55 + 0.45 * np.log1p(counts) / np.log1p(max_count), 0.0)
    fill_below(pixels, heights, color)


def draw_spans(lines: Pixels, rows: IntArray, first: IntArray, last: IntArray, colors: Pixels) -> None:
    """Draw spans of columns (`last` exclusive) into the rows of `lines`. Later spans overwrite earlier ones."""
    first = first.clip(0, lines.shape[1] - 1)
    widths = last.clip(first + 1, lines.shape[1]) - first
    offsets = np.cumsum(widths) - widths
    columns = np.arange(int(widths.sum())) + np.repeat(first - offsets, widths)
    lines[np.repeat(rows, widths), columns] = np.repeat(colors, widths)
