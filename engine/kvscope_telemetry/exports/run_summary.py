"""Summarizes a recording, or a range of it, in a few figures, for people and for scripts.

Decides which facts accompany the figures; `summaries.run_figures` defines the figures. Computed from the overview
alone, without replaying.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.run_figures import FIGURES, measured, peak_usage_time_ns, rows_in
from kvscope_telemetry.summaries.session_overview import SessionOverview

_OTHER_FIELDS: Final = ("num_steps", "num_lost_frames")
_TOTALS: Final = tuple(figure.column for figure in FIGURES if figure.column and figure.column not in _OTHER_FIELDS)


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    block_size_tokens: int
    block_bytes: int
    dtype: str
    allocator: str
    prefix_caching: bool
    num_host_blocks: int
    num_disk_blocks: int
    num_states: int = 0
    """Number of slots for recurrent states, which are outside the pool."""
    num_host_states: int = 0


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Key figures of a recording or of a range of it. Shares are 0 to 1. A figure is None if it is unknown."""

    model: str
    device: str
    engine_version: str
    pool: PoolFacts
    epochs: tuple[int, ...]
    """Epochs (engine starts) of the whole recording."""
    start_ns: int
    end_ns: int
    length_s: float
    num_steps: int | None
    peak_usage: float | None
    peak_usage_s: float | None
    """Time at which `peak_usage` was first reached, in seconds of the recording."""
    mean_usage: float | None
    peak_waiting: int
    num_lost_frames: int
    num_silences: int
    """Number of gaps of more than a second in which nothing was recorded."""
    silent_s: float
    totals: dict[str, int | None]
    """Sum of each counter; None if the engine does not report it."""
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    queued_p95_s: float | None
    latencies_are_bounds: bool = False
    """Whether the engine reports latencies as histograms, so that the percentiles are upper bounds."""
    figures: dict[str, float | None] = {}
    """All figures of `summaries.run_figures` by key, including those that are fields of this class."""


def summarize_run(recording: Recording, overview: SessionOverview, span: Span) -> RunSummary:
    hello, rows = recording.info.hello, rows_in(overview, span)
    found = measured(overview, span)
    peak_ns = peak_usage_time_ns(overview, rows)
    return RunSummary(
        model=short_name(hello.model.name),
        device=" ".join(filter(None, (hello.device.kind, hello.device.name))),
        engine_version=hello.engine_version,
        pool=_pool(recording),
        epochs=recording.info.epochs,
        start_ns=span.from_ns,
        end_ns=span.until_ns,
        length_s=span.length_s,
        num_steps=_whole(found["num_steps"]),
        peak_usage=found["usage_peak"],
        peak_usage_s=None if peak_ns is None else max(0.0, span.seconds(min(peak_ns, span.until_ns))),
        mean_usage=found["usage_mean"],
        peak_waiting=_whole(found["waiting_peak"]) or 0,
        num_lost_frames=_whole(found["num_lost_frames"]) or 0,
        num_silences=_whole(found["num_silences"]) or 0,
        silent_s=found["silent_s"] or 0.0,
        totals={name: _whole(found[name]) for name in _TOTALS},
        first_token_p50_s=found["first_token_p50_s"],
        first_token_p95_s=found["first_token_p95_s"],
        inter_token_p50_s=found["inter_token_p50_s"],
        inter_token_p95_s=found["inter_token_p95_s"],
        queued_p95_s=found["queued_p95_s"],
        latencies_are_bounds=not hello.capabilities.latencies,
        figures=found,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _pool(recording: Recording) -> PoolFacts:
    cache = recording.info.hello.cache
    return PoolFacts(
        num_blocks=cache.num_blocks,
        block_size_tokens=cache.block_size,
        block_bytes=cache.block_bytes,
        dtype=cache.dtype,
        allocator=cache.allocator,
        prefix_caching=cache.prefix_caching,
        num_host_blocks=cache.num_host_blocks,
        num_disk_blocks=cache.num_disk_blocks,
        num_states=cache.num_states,
        num_host_states=cache.num_host_states,
    )
