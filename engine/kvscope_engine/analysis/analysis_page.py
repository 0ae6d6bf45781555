"""An analysis of prompts as an HTML page without scripts and external resources."""

from __future__ import annotations

from html import escape
from math import log

from kvscope_engine.analysis.analysis_report import PromptAnalysis
from kvscope_engine.analysis.analysis_text import difference_text, note_lines, one_line, percent, summary_lines
from kvscope_telemetry.exports.report.charts import BOTTOM, LEFT, PLOT_WIDTH, RIGHT, TOP, WIDTH, number_text, svg
from kvscope_telemetry.exports.report.report_page import clean, page, section, table

_HEIGHT = 220


def analysis_page(analysis: PromptAnalysis) -> str:
    title = f"Prompts of {analysis.file}"
    differences = analysis.differences
    return page(
        title,
        [
            f"<h1>{clean(title)}</h1>",
            *(f"<p>{clean(line)}</p>" for line in summary_lines(analysis)),
            section("Hit rate by size of the pool", _curve(analysis), _pools(analysis)),
            section("Shared prefixes", _prefixes(analysis)),
            section("Hit rate by block size, if nothing is evicted", _block_sizes(analysis)),
            section(
                "Early differences",
                ""
                if differences is None
                else "".join(
                    f"<p>{clean(line)}</p>"
                    for line in difference_text(differences, analysis.unbounded_hit_rate).splitlines()
                ),
            ),
            section("Notes", "".join(f'<p class="note">{clean(line)}</p>' for line in note_lines(analysis))),
        ],
    )


def _curve(analysis: PromptAnalysis) -> str:
    """Draw hit rate against pool size, on a logarithmic axis. The dashed line is the hit rate without evictions."""
    smallest, largest = analysis.pools[0].num_blocks, analysis.pools[-1].num_blocks
    plot_height = _HEIGHT - TOP - BOTTOM

    def x(num_blocks: int) -> float:
        return LEFT + PLOT_WIDTH * (log(num_blocks / smallest) / log(largest / smallest) if largest > smallest else 1.0)

    def y(share: float) -> float:
        return TOP + plot_height * (1 - share)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
            f'<text class="label end" x="{LEFT - 6}" y="{y(share) + 4:.1f}">{share:.0%}</text>'
        )
    for pool in analysis.pools[1:]:
        parts.append(
            f'<text class="label end" x="{x(pool.num_blocks):.1f}" y="{_HEIGHT - 6}">'
            f"{escape(number_text(pool.num_blocks))} blocks</text>"
        )
    points = " ".join(f"{x(pool.num_blocks):.1f},{y(pool.hit_rate):.1f}" for pool in analysis.pools)
    limit = y(analysis.unbounded_hit_rate)
    parts.append(f'<g class="prefill"><polyline class="curve" points="{points}"/>')
    parts.append(
        f'<line class="curve" stroke-dasharray="4 4" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{limit:.1f}"'
        f' y2="{limit:.1f}"/></g>'
    )
    drawing = svg(_HEIGHT, "Hit rate against the size of the pool", "".join(parts))
    return f'{drawing}<p class="soft">Dashed: if nothing is ever evicted. The axis of sizes is logarithmic.</p>'


def _pools(analysis: PromptAnalysis) -> str:
    rows = [
        [f"{pool.num_blocks:,}", f"{pool.num_blocks * analysis.block_size:,}", percent(pool.hit_rate)]
        for pool in analysis.pools
    ]
    rows.append(["unbounded", "–", percent(analysis.unbounded_hit_rate)])
    return table([("blocks", True), ("tokens", True), ("hit rate", True)], rows)


def _block_sizes(analysis: PromptAnalysis) -> str:
    rows = [[f"{each.block_size:,}", percent(each.hit_rate)] for each in analysis.block_sizes]
    return table([("block size", True), ("hit rate", True)], rows)


def _prefixes(analysis: PromptAnalysis) -> str:
    if not analysis.prefixes:
        return "<p>No shared prefix saves 0.1 % of the tokens.</p>"
    rows = [
        [
            f"{entry.num_prompts:,}",
            f"{entry.num_tokens:,}",
            f"{entry.num_saved_tokens:,}",
            f'<span style="padding-left:{16 * entry.depth}px">'
            f"{clean(one_line(entry.text) or f'tokens from {entry.start_token:,}')}</span>",
        ]
        for entry in analysis.prefixes
    ]
    header = [("prompts", True), ("tokens", True), ("tokens saved", True), ("begins with", False)]
    return table(header, rows)
