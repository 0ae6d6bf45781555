"""Texts for the laboratory's results, shared by the table and the HTML report. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvscope_engine.bench.laboratory.measuring import Measurement
    from kvscope_engine.bench.laboratory.sparse_quality import SparseRow

HEADER: Final = ("method", "tokens", "time", "KV a token", "workspace a token", "error", "perplexity")


def cells(row: Measurement) -> list[str]:
    change = row["perplexity_change"]
    return [
        row["method"],
        f"{row['length']:,}",
        f"{row['time_us']:,.0f} µs",
        f"{row['kv_bytes_per_token']:,.0f} B",
        f"{row['workspace_bytes_per_token']:,.1f} B",
        f"{100 * row['error']:.2f} %",
        f"{row['perplexity']:.3f} ({100 * change:+.2f} %)" if change is not None else "",
    ]


def headline(report: dict[str, Any]) -> str:
    return (
        f"{report['model']}, {report['dtype']}, {report['device']}; {report['batch']} concurrent requests, means of "
        f"{report['num_layers']} layers; perplexity of {report['num_scored_tokens']} tokens"
    )


def heat_text(heat: dict[str, Any]) -> str:
    return (
        f"page heat at {heat['num_context_tokens']:,} tokens: a measured step takes {heat['measured_step_ms']:.1f} "
        f"ms, other steps take {heat['other_step_ms']:.1f} ms; measuring one step in {heat['every']} costs "
        f"{100 * heat['cost_share']:.2f} % of decode's time"
    )


def sparse_text(row: SparseRow) -> str:
    error = row["perplexity_error"]
    change = f"{100 * row['perplexity_change']:+.2f} %" + (f" ± {100 * error:.2f}" if error is not None else "")
    return (
        f"sparse decode {row['fraction']:g}: up to {row['num_attended_blocks']} blocks,"
        f" perplexity {row['perplexity']:.3f} ({change}),"
        f" {row['divergence']:.4f} nats a token from full attention, {row['step_ms']:.1f} ms a step of one request"
    )
