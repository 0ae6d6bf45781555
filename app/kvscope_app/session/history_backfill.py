"""Fills the history before the time of a seek: charts and events of the preceding minutes, from the overview.

Each second of the overview is spread over the history's bins, so that a seek takes the same time at any load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from kvscope_app.session.history import BIN_NS, BLOCK_GAUGES, FRAME_GAUGES, KNOWN_SUMS, SAMPLE_GAUGES, SUMS, History
from kvscope_telemetry.messages.telemetry import DeviceSample
from kvscope_telemetry.summaries.session_overview import FloatArray, SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

_BINS_PER_SECOND: Final = SECOND_NS // BIN_NS
_MAX_SAMPLE_AGE_S: Final = 60
"""Maximum age of a device's last known value. Devices are sampled once per second."""
OVERVIEW_NAMES: Final[Mapping[str, str]] = {
    **{name: name for name in (*FRAME_GAUGES, *SAMPLE_GAUGES)},
    "blocks_active": "active_blocks",
    "blocks_cached": "cached_blocks",
    "blocks_free": "free_blocks",
    "ttft_p50_s": "first_token_p50_s",
    "ttft_p95_s": "first_token_p95_s",
    "itl_p50_s": "inter_token_p50_s",
    "itl_p95_s": "inter_token_p95_s",
    "queue_p50_s": "queued_p50_s",
    "queue_p95_s": "queued_p95_s",
}
"""Overview column of each gauge and latency of the history."""


_SPREAD_COLUMNS: Final = {f"{kind}_tokens": f"{kind}_tokens_per_s" for kind in ("prefill", "decode")}


def backfill_history(history: History, overview: SessionOverview, start_ns: int) -> None:
    """Fill `history` with the time before its `began_ns`, but not before `start_ns` (wall clock), the timeline's start.

    May be called again after the overview has grown.
    """
    began_ns = history.began_ns
    if began_ns is None:
        return
    wall_ns = history.wall_ns(0)
    first_ns = max(began_ns - round(history.max_seconds * 1e9), start_ns - wall_ns)
    _backfill_events(history, overview, first_ns + wall_ns, began_ns + wall_ns)
    first, last = max(0, overview.index_at(first_ns + wall_ns)), overview.index_at(began_ns + wall_ns) + 1
    if first >= last:
        return
    starts = (overview.time_ns[first:last] - wall_ns) // BIN_NS
    bins = (starts[:, None] + np.arange(_BINS_PER_SECOND)).ravel()
    before = (bins < began_ns // BIN_NS) & (bins > first_ns // BIN_NS)
    values = {name: history_column(overview, name)[first:last] / _BINS_PER_SECOND for name in SUMS}
    # The end of the current second is not known yet at that time: use the previous second.
    indices = np.arange(first, last)
    if last - first > 1 and overview.time_ns[last - 1] + SECOND_NS > began_ns + wall_ns:
        indices[-1] -= 1
    values |= {name: history_column(overview, name)[indices] for name in OVERVIEW_NAMES}
    history.ring.set(
        bins[before], {name: np.repeat(column, _BINS_PER_SECOND)[before] for name, column in values.items()}
    )
    _copy_gauges_before(history, began_ns // BIN_NS)
    history.known_columns |= {name for name in SAMPLE_GAUGES if np.isfinite(values[name]).any()}
    history.known_columns |= {name for name in KNOWN_SUMS if np.nan_to_num(values[name]).any()}
    history.past_sample = _sample_at(overview, int(indices[-1]))
    if np.isfinite(values["queue_p50_s"]).any():
        history.known_columns.add("queue_p50_s")


def history_column(overview: SessionOverview, name: str) -> FloatArray:
    """Return the overview column for the history's column `name`.

    If the number of free blocks is unknown, returns the number of blocks that are not active instead. Tokens are spread
    over the duration of their steps, as in the history.
    """
    column = overview.column(OVERVIEW_NAMES.get(name) or _SPREAD_COLUMNS.get(name, name))
    if name != "blocks_free":
        return column
    not_active: FloatArray = overview.column("pool_blocks") - overview.column("active_blocks")
    return np.where(np.isnan(column), not_active, column)


def _copy_gauges_before(history: History, bin_number: int) -> None:
    """Copy the current gauges to the bin before the seek, so that curves end with the values that the page map
    shows.
    """
    present = history.ring.read(bin_number, bin_number, (*BLOCK_GAUGES, *FRAME_GAUGES))
    known = {name: float(column[0]) for name, column in present.items() if np.isfinite(column[0])}
    history.ring.set_bin(bin_number - 1, known)


def _sample_at(overview: SessionOverview, index: int) -> DeviceSample | None:
    """Return the newest known device values up to second `index`, from the same engine start; None if unknown."""
    first = max(0, index + 1 - _MAX_SAMPLE_AGE_S)
    epoch = overview.epoch[first : index + 1] == overview.epoch[index]

    def last_known(name: str) -> float:
        values = overview.column(name)[first : index + 1]
        known = np.flatnonzero(np.isfinite(values) & epoch)
        return float(values[known[-1]]) if known.size else -1.0

    sample = DeviceSample(
        epoch=int(overview.epoch[index]),
        time_ns=0,
        memory_used_bytes=int(last_known("memory_used_bytes")),
        process_bytes=int(last_known("process_bytes")),
        utilization=last_known("utilization"),
        power_watts=last_known("power_watts"),
        temperature_celsius=last_known("temperature_celsius"),
    )
    return sample if sample.memory_used_bytes >= 0 or sample.process_bytes >= 0 else None


def _backfill_events(history: History, overview: SessionOverview, first_ns: int, last_ns: int) -> None:
    wall_ns = history.wall_ns(0)
    indices = overview.events.find(first_ns, last_ns).tolist()[-history.events.max_events :]
    events = [overview.events[index] for index in indices]
    # Events of the current step arrive with its frame, which is not shown yet, so the state does not include them.
    newest_ns = history.began_engine_ns
    events = [each for each in events if each.epoch != history.epoch or each.event.time_ns <= newest_ns]
    history.events.replace_oldest(
        [(timed.time_ns - wall_ns, timed.epoch, timed.event) for timed in events], history.num_past_events
    )
    history.num_past_events = len(events)
    history.request_times.add_events(timed.event for timed in events if timed.epoch == history.epoch)
    moments = overview.moments.rows
    was_before = (moments["epoch"] == history.epoch) & (moments["time_ns"] <= history.began_engine_ns)
    history.request_times.add_moments(moments[was_before])
