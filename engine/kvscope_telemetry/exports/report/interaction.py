"""Data and script that let a reader of a report zoom its charts, read values, and sort and filter its requests.

Owns the format of the data, which the script in `kvscope_resources/report` reads, and its limits of size. Without
JavaScript, the report shows everything except the table of requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from kvscope_telemetry.exports.report.charts import (
    BOTTOM,
    LEFT,
    PLOT_WIDTH,
    TOP,
    ChartLine,
    FloatArray,
    ReportTimeAxis,
    usual_gap_s,
)
from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.printable import printable

MAX_POINTS: Final = 3_600
MAX_REPORT_BYTES: Final = 1_900_000
"""Size of the whole report, to which the number of requests in its table is fitted."""
_MIN_REQUEST_BYTES: Final = 300_000
_MAX_TEXT: Final = 40
_SCRIPTS: Final = ("logic.js", "page.js")
_COLUMNS: Final = (
    ("number", "Request", "number", 1.0, "Request number; click one to show its time in the charts"),
    ("id", "Id", "request_id", 1.0, "Id chosen by the client"),
    ("state", "State", "state", 1.0, "State at the end of the range"),
    ("arrival", "Arrival, s", "arrival_s", 1.0, "Seconds from the recording's start"),
    ("queue", "Queue, s", "queue_ns", 1e-9, "From arrival until it first ran"),
    ("first", "First token, s", "first_token_ns", 1e-9, "From arrival to its first token"),
    ("preempted", "Preempted, s", "preempted_ns", 1e-9, "Time preempted, in total"),
    ("total", "Total, s", "total_ns", 1e-9, "From arrival to its end"),
    ("prompt", "Prompt", "num_prompt_tokens", 1.0, "Prompt tokens"),
    ("cached", "Cached", "num_cached_tokens", 1.0, "Prompt tokens from the prefix cache"),
    ("output", "Output", "num_output_tokens", 1.0, "Generated tokens"),
    ("preemptions", "Preemptions", "num_preemptions", 1.0, "Number of preemptions"),
    ("adapter", "Adapter", "adapter", 1.0, "LoRA adapter"),
)
"""Key in the filter, title, column of the requests table, factor of its values, and tooltip."""


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Curves of a chart at all points in time, with the chart's unit and the upper end of its value axis."""

    lines: Sequence[ChartLine]
    unit: str
    top: float


def interaction(
    axis: ReportTimeAxis, times_s: FloatArray, charts: Sequence[ChartSeries], requests: Table, num_bytes: int
) -> tuple[str, str]:
    """Return the HTML of the data and of the script, and the script's source for the page's security policy.

    Args:
        times_s: Times of the points of all `charts`, shape (n,).
        requests: The exported table of requests.
        num_bytes: Size of the rest of the report.
    """
    times_s, all_charts = _thinned(axis, times_s, charts)
    data: dict[str, Any] = {
        "axis": {"from": axis.from_s, "until": axis.until_s},
        "plot": {"left": LEFT, "width": PLOT_WIDTH, "top": TOP, "bottom": BOTTOM},
        "gap": 2.5 * usual_gap_s(times_s),
        "times": _rounded(times_s, 2),
        "charts": all_charts,
    }
    script = _script()
    num_free = MAX_REPORT_BYTES - num_bytes - len(_json(data)) - len(script)
    data["requests"] = _requests(requests, max(num_free, _MIN_REQUEST_BYTES))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = f'<script type="application/json" id="report-data">{_json(data)}</script>\n<script>{script}</script>'
    return html, f"'sha256-{digest}'"


def _script() -> str:
    folder = resources.files("kvscope_resources") / "report"
    return "\n".join((folder / name).read_text("utf-8") for name in _SCRIPTS)


def _json(data: object) -> str:
    """Return JSON that cannot end the script element it is in, whatever text it contains."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _thinned(
    axis: ReportTimeAxis, times_s: FloatArray, charts: Sequence[ChartSeries]
) -> tuple[FloatArray, list[dict[str, Any]]]:
    """Return times and curves as data. More than `MAX_POINTS` points are reduced to the maximum of each interval."""
    starts = np.arange(len(times_s))
    if len(times_s) > MAX_POINTS:
        length_s = max(axis.until_s - axis.from_s, 1e-9)
        interval = np.clip((times_s - axis.from_s) / length_s * MAX_POINTS, 0, MAX_POINTS - 1).astype(np.int64)
        starts = np.unique(interval, return_index=True)[1]

    def values(line: ChartLine) -> list[float | None]:
        if not len(starts):
            return []
        return _significant(np.fmax.reduceat(line.values, starts))  # the maximum of the known values

    data = [
        {
            "unit": chart.unit,
            "top": chart.top,
            "lines": [
                {
                    "name": line.value_name or line.name,
                    "css": line.css_class,
                    "area": line.is_area,
                    "values": values(line),
                }
                for line in chart.lines
            ],
        }
        for chart in charts
    ]
    return times_s[starts], data


def _requests(table: Table, max_bytes: int) -> dict[str, Any] | None:
    """Return the columns of the table of requests; None without requests. If they do not fit into `max_bytes`, those
    with the longest total time are included.
    """
    if not table.num_rows:
        return None
    exported = {column.name: column for column in table.columns}
    columns = [
        {"key": key, "title": title, "tip": tip, **_kind_and_values(exported[name], factor)}
        for key, title, name, factor, tip in _COLUMNS
    ]
    columns = [column for column in columns if column["key"] != "adapter" or any(column["values"])]
    kept = _fitting_rows(columns, max_bytes)
    for column in columns:
        column["values"] = [column["values"][row] for row in kept]
    return {"columns": columns, "num_all": table.num_rows}


def _kind_and_values(column: Column, factor: float) -> dict[str, Any]:
    if column.type == "text":
        return {"kind": "text", "values": [_text(str(value)) for value in column.values]}
    if column.type == "int" and factor == 1.0:
        return {"kind": "count", "values": list(column.values)}
    values = [None if value is None else round(float(value) * factor, 3) for value in column.values]
    return {"kind": "seconds", "values": values}


def _fitting_rows(columns: list[dict[str, Any]], max_bytes: int) -> list[int]:
    totals = next(column["values"] for column in columns if column["key"] == "total")
    # Requests without an end come first.
    order = sorted(range(len(totals)), key=lambda row: -(math.inf if totals[row] is None else totals[row]))
    kept: list[int] = []
    num_bytes = 0
    for row in order:
        num_bytes += sum(len(_json(column["values"][row]).encode("utf-8", "replace")) + 1 for column in columns)
        if num_bytes > max_bytes:
            break
        kept.append(row)
    return sorted(kept)


def _text(text: str) -> str:
    text = printable(text, replacement="�")
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _rounded(values: FloatArray, digits: int) -> list[float]:
    rounded: list[float] = np.round(values, digits).tolist()
    return rounded


def _significant(values: FloatArray) -> list[float | int | None]:
    """Return the values with four digits; None for unknown ones."""
    texts = [f"{value:.4g}" if math.isfinite(value) else "" for value in values.tolist()]
    return [None if not text else _number(float(text)) for text in texts]


def _number(value: float) -> float | int:
    return int(value) if value.is_integer() else value
