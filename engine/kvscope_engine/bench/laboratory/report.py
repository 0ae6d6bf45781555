"""HTML report of the laboratory: one file without scripts, with one plot per measured quantity and the
complete table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvscope_engine.bench.laboratory.labels import HEADER, cells, headline, heat_text, sparse_text
from kvscope_engine.bench.laboratory.measuring import Measurement
from kvscope_telemetry.exports.report.report_page import clean, page, section, table

_WIDTH: Final = 960
_NAME_WIDTH: Final = 170
_VALUE_WIDTH: Final = 90
_LINE: Final = 20


class BarPlot(NamedTuple):
    title: str
    value: Callable[[Measurement], float | None]
    text: Callable[[float], str]


_FIGURES: Final = (
    BarPlot("Time of one layer, µs", lambda row: row["time_us"], lambda value: f"{value:,.0f} µs"),
    BarPlot("Kept for each token, bytes", lambda row: row["kv_bytes_per_token"], lambda value: f"{value:,.0f} B"),
    BarPlot(
        "Held meanwhile for each token, bytes",
        lambda row: row["workspace_bytes_per_token"],
        lambda value: f"{value:,.1f} B",
    ),
    BarPlot("Error of the output", lambda row: row["error"], lambda value: f"{100 * value:.2f} %"),
    BarPlot("Perplexity", lambda row: row["perplexity"], lambda value: f"{value:.3f}"),
)


def html(report: dict[str, Any]) -> str:
    rows: list[Measurement] = report["rows"]
    body = [f"<h1>Ways to attend</h1>\n<p>{clean(headline(report))}</p>"]
    for length in sorted({row["length"] for row in rows}):
        rows_of_length = [row for row in rows if row["length"] == length]
        plots = (
            f"<h3>{clean(figure.title)}</h3>{plot}" for figure in _FIGURES if (plot := bars(figure, rows_of_length))
        )
        body.append(section(f"{length:,} tokens", *plots))
    header = [(name, column > 0) for column, name in enumerate(HEADER)]
    body.append(section("All figures", table(header, [[clean(cell) for cell in cells(row)] for row in rows])))
    if report["sparse_decode"]:
        lines = "".join(f"<p>{clean(sparse_text(row))}</p>" for row in report["sparse_decode"])
        body.append(section("What --sparse-decode does", lines))
    if report["page_heat"] is not None:
        body.append(section("What --page-heat costs", f"<p>{clean(heat_text(report['page_heat']))}</p>"))
    body.append(f"<footer>kvscope {clean(report['version'])}, {clean(report['date'])}</footer>")
    return page("kvscope: attention methods compared", body)


def bars(figure: BarPlot, rows: Sequence[Measurement]) -> str:
    """Return an SVG with a bar for each row that has a value, or "" if no row has one."""
    values = [
        (row["method"], value) for row in rows if (value := figure.value(row)) is not None and math.isfinite(value)
    ]
    if not values:
        return ""
    highest = max((value for _, value in values), default=0.0) or 1.0
    bar_area_width = _WIDTH - _NAME_WIDTH - _VALUE_WIDTH
    parts = []
    for index, (name, value) in enumerate(values):
        y, width = index * _LINE, max(1.0, bar_area_width * value / highest)
        parts.append(
            f'<text class="label end" x="{_NAME_WIDTH - 8}" y="{y + 14}">{clean(name)}</text>'
            f'<rect class="bar prefill" x="{_NAME_WIDTH}" y="{y + 3}" width="{width:.1f}" height="{_LINE - 6}"/>'
            f'<text class="label" x="{_NAME_WIDTH + width + 6:.1f}" y="{y + 14}">{clean(figure.text(value))}</text>'
        )
    description = "; ".join(f"{name} {figure.text(value)}" for name, value in values)
    size = f'viewBox="0 0 {_WIDTH} {len(values) * _LINE}"'
    return f'<svg role="img" aria-label="{clean(figure.title + ": " + description)}" {size}>{"".join(parts)}</svg>'
