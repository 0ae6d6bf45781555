"""Figures (per-second values) that alarm expressions can name: their names, units, and how to read them from an
overview.

A figure is read for many seconds at once, with the same definition as in views and exports; NaN means unknown. Figures
that `summaries.run_figures` defines for a range of time are taken from there. A figure added here can be used in every
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.alarms.forecast import WINDOW_S, seconds_left
from kvscope_telemetry.latencies import FIRST_TOKEN, INTER_TOKEN, QUEUED, LatencyKind
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.summaries.run_figures import (
    CACHE,
    FIGURES,
    REQUESTS,
    TOKENS,
    Share,
    fragmentation_of,
    pool_of,
    usage_of,
)
from kvscope_telemetry.summaries.session_overview import OVERVIEW_COLUMNS, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS
from kvscope_telemetry.summaries.unknown_fields import unknown_fields

FloatArray = npt.NDArray[np.float64]
Read = Callable[[SessionOverview, slice], FloatArray]
"""Function that returns the values of the given rows of an overview, shape (n,)."""
_DERIVED_FROM_USAGE: Final = {"active_blocks"}
"""Overview columns that can be derived from KV usage alone. They are known for engines that report usage but
not the number of free blocks.
"""
_STALL_LOOKBACK_NS: Final = 600 * SECOND_NS
_STALL_FACTOR: Final = 4.0
"""An engine counts as stalled if it takes longer than this multiple of the longest recent step. Below that, it
may just be slowed down by other load on the machine.
"""


@dataclass(frozen=True, slots=True)
class SecondFigure:
    name: str
    label: str
    unit: str
    """Unit of the values: "share" (0 to 1), "blocks", "ms", "/s", ..."""
    group: str
    columns: tuple[str, ...]
    """Overview columns that an engine must report for the figure to be known."""
    read: Read
    read_low: Read | None = None
    """Function that returns the lower bound of a value that is known only as a histogram bucket; `read` returns
    the upper bound. None if values are exact.
    """
    is_known_while_stopped: bool = False
    """Whether the figure has a meaning while the engine is paused. If False, it is unknown in such seconds."""

    def is_available(self, capabilities: Capabilities) -> bool:
        return (unknown_fields(capabilities) - _DERIVED_FROM_USAGE).isdisjoint(self.columns)


def forecast_at(overview: SessionOverview, time_ns: int) -> float | None:
    """Return the seconds until free and cached blocks run out, forecast from the overview's seconds that ended by
    `time_ns`.

    Returns None if there is no forecast: the newest of these seconds ended more than 5 s before, the engine was stopped
    within the window, or the number of blocks does not clearly fall.
    """
    last = overview.index_at(time_ns + 1 - SECOND_NS) + 1
    if not last or time_ns - int(overview.time_ns[last - 1]) > 5_000_000_000:
        return None
    first = max(0, last - WINDOW_S)
    first += int(np.count_nonzero(overview.epoch[first:last] != overview.epoch[last - 1]))
    if overview.stops.stopped_ns(int(overview.time_ns[first]), time_ns):
        return None  # the trend before a pause says nothing about the time after it
    active, cached, free = (overview.column(f"{name}_blocks")[first:last] for name in ("active", "cached", "free"))
    pool = float(active[-1] + cached[-1] + free[-1])
    return seconds_left((overview.time_ns[first:last] - overview.time_ns[first]) / 1e9, cached + free, pool)


def _run_out_s(overview: SessionOverview, rows: slice) -> FloatArray:
    """Return for each row the forecast seconds until no free and cached blocks are left.

    Infinite if no decrease is forecast or if none are left already; NaN if the number of blocks is unknown.
    """
    num_available = overview.column("cached_blocks")[rows] + overview.column("free_blocks")[rows]
    forecasts = [forecast_at(overview, time_ns) for time_ns in (overview.time_ns[rows] + SECOND_NS - 1).tolist()]
    seconds = np.array([np.inf if each is None else each for each in forecasts], np.float64)
    return np.where(np.isnan(num_available), np.nan, np.where(num_available <= 0, np.inf, seconds))


def _stalled_s(overview: SessionOverview, rows: slice) -> FloatArray:
    stalled = overview.column("stalled_s")
    values = stalled[rows].copy()
    for index in np.flatnonzero(values > 0).tolist():
        row = rows.start + index
        if values[index] <= _STALL_FACTOR * _longest_recent_step_s(overview, row):
            values[index] = 0.0
    return values


def _longest_recent_step_s(overview: SessionOverview, row: int) -> float:
    """Return the duration in seconds of the longest step in the ten minutes before the end of the second at
    `row`. Steps of earlier engine starts do not count.
    """
    first = int(np.searchsorted(overview.time_ns, int(overview.time_ns[row]) - _STALL_LOOKBACK_NS))
    first += int(np.count_nonzero(overview.epoch[first : row + 1] != overview.epoch[row]))
    num_steps, run_ns = (overview.column(name)[first : row + 1] for name in ("num_steps", "run_ns"))
    before = np.nan_to_num(overview.column("stalled_s")[first : row + 1])
    waited_s = np.concatenate(([0.0], before[:-1]))
    has_step = num_steps > 0
    took_s = np.maximum(run_ns[has_step] / num_steps[has_step] / 1e9, waited_s[has_step])
    return float(took_s.max(initial=0.0))


def _column(name: str, scale: float, overview: SessionOverview, rows: slice) -> FloatArray:
    return overview.column(name)[rows] * scale


def _percentile_low(column: str, overview: SessionOverview, rows: slice) -> FloatArray:
    """Return a latency percentile in ms: just above the lower edge of its histogram bucket, or the exact value
    where it is known.
    """
    above = overview.column(f"{column}_above_s")[rows]
    exact = overview.column(f"{column}_s")[rows]
    return np.where(np.isnan(above), exact, np.nextafter(above, np.inf)) * 1e3


def _percentile(column: str, overview: SessionOverview, rows: slice) -> FloatArray:
    """Return a latency percentile in ms: the upper edge of its histogram bucket (infinite for the last bucket),
    or the exact value where it is known.
    """
    above, value = overview.column(f"{column}_above_s")[rows], overview.column(f"{column}_s")[rows]
    return np.where(np.isnan(value) & ~np.isnan(above), np.inf, value) * 1e3


def _share(share: Share, overview: SessionOverview, rows: slice) -> FloatArray:
    return share.over({name: overview.column(name)[rows] for name in share.names()})


def _step_ms(overview: SessionOverview, rows: slice) -> FloatArray:
    num_steps = overview.column("num_steps")[rows]
    took: FloatArray = overview.column("run_ns")[rows] / np.where(num_steps > 0, num_steps, np.nan) / 1e6
    return took


def _plain(
    group: str, name: str, label: str, unit: str, column: str = "", *, is_known_while_stopped: bool = False
) -> SecondFigure:
    read = partial(_column, column or name, 1.0)
    return SecondFigure(
        name, label, unit, group, (column or name,), read, is_known_while_stopped=is_known_while_stopped
    )


def _of_figures(group: str) -> Iterator[SecondFigure]:
    """Yield a per-second figure (a share, or a rate per second) for each figure of `summaries.run_figures` in
    this group.
    """
    for figure in FIGURES:
        if figure.uses.alarms == group and figure.share is not None:
            names, read = figure.share.names(), partial(_share, figure.share)
            yield SecondFigure(figure.key, figure.name, "share", group, names, read)
        elif figure.uses.alarms == group:
            name = f"{figure.column}_per_s"
            column = name if name in OVERVIEW_COLUMNS else figure.column
            read = partial(_column, column, 1.0)
            yield SecondFigure(name, f"{figure.name} per second", "/s", group, (figure.column,), read)


def _latency(short: str, latency: LatencyKind, percent: int) -> SecondFigure:
    column = f"{latency.key}_p{percent}"
    return SecondFigure(
        f"{short}_p{percent}_ms",
        f"{latency.name}, p{percent} of the second",
        "ms",
        "Latency",
        (),
        partial(_percentile, column),
        partial(_percentile_low, column),
    )


_BLOCKS: Final = "blocks"
_POOL, _STEPS, _DEVICE = "Pool", "Steps", "Device"
_ALL: Final = (
    SecondFigure(
        "kv_usage",
        "Share of the pool held by requests, 0 to 1",
        "share",
        _POOL,
        ("active_blocks",),
        usage_of,
    ),
    SecondFigure("num_blocks", "Blocks of the pool", _BLOCKS, _POOL, (), pool_of),
    _plain(_POOL, "active_blocks", "Blocks held by requests", _BLOCKS),
    _plain(_POOL, "cached_blocks", "Blocks not held by any request, kept for their prefix", _BLOCKS),
    _plain(_POOL, "free_blocks", "Free blocks", _BLOCKS),
    _plain(_POOL, "shared_blocks", "Blocks that several requests hold", _BLOCKS),
    _plain(_POOL, "host_blocks", "Blocks in host memory", _BLOCKS),
    _plain(_POOL, "disk_blocks", "Blocks on disk", _BLOCKS),
    SecondFigure(
        "external_fragmentation",
        "Share of free blocks outside the longest free run",
        "share",
        _POOL,
        ("free_blocks", "longest_free_run"),
        fragmentation_of,
    ),
    SecondFigure(
        "blocks_run_out_s",
        "Seconds until free and cached blocks are gone at the current rate",
        "s",
        _POOL,
        ("cached_blocks", "free_blocks"),
        _run_out_s,
    ),
    _plain(REQUESTS, "running", "Requests running", "requests", "num_running"),
    _plain(REQUESTS, "waiting", "Requests waiting", "requests", "num_waiting"),
    _plain(REQUESTS, "longest_wait_s", "Longest wait of a request for its first step", "s"),
    *_of_figures(REQUESTS),
    *(
        _latency(short, latency, percent)
        for short, latency in (("ttft", FIRST_TOKEN), ("itl", INTER_TOKEN), ("queue", QUEUED))
        for percent in (50, 95, 99)
    ),
    *_of_figures(TOKENS),
    *_of_figures(CACHE),
    _plain(_STEPS, "steps_per_s", "Steps per second", "/s", "num_steps"),
    SecondFigure("step_ms", "Mean duration of a step", "ms", _STEPS, ("num_steps", "run_ns"), _step_ms),
    SecondFigure(
        "stalled_s",
        "Time without a finished step while requests are unfinished",
        "s",
        _STEPS,
        ("stalled_s", "num_steps", "run_ns"),
        _stalled_s,
    ),
    _plain(
        _DEVICE,
        "utilization",
        "GPU busy, or the engine's share of all CPUs, 0 to 1",
        "share",
        is_known_while_stopped=True,
    ),
    _plain(_DEVICE, "power_watts", "Power of the device", "W", is_known_while_stopped=True),
    _plain(_DEVICE, "temperature_celsius", "Temperature of the device", "°C", is_known_while_stopped=True),
    _plain(_DEVICE, "memory_used_bytes", "Memory used on the device", "bytes", is_known_while_stopped=True),
    _plain(
        _DEVICE, "process_bytes", "Memory of the engine's process on the device", "bytes", is_known_while_stopped=True
    ),
    _plain(
        "Telemetry", "lost_frames", "Telemetry frames lost", "frames", "num_lost_frames", is_known_while_stopped=True
    ),
)
SECOND_FIGURES: Final = {figure.name: figure for figure in _ALL}


def value_text(value: float, unit: str) -> str:
    """Format a value with its unit: `97.0 %`, `31 s`, `731 ms`, `1.5/s`."""
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        return f"{value / (1 << 30):.2f} GiB"
    digits = 0 if unit in ("s", "ms", "°C", "W") and abs(value) >= 10 else 1
    number = f"{value:,.0f}" if value == round(value) else f"{value:,.{digits}f}"
    return f"{number}{'' if unit.startswith('/') or not unit else ' '}{unit}"
