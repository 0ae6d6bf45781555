"""Recent history of an engine for charts: ring buffers bounded by time and bytes, filled from updates. Imports no Qt.

All times are on this machine's monotonic clock, also those of recordings (negative if before the boot). Frame times of
an epoch are converted to this clock with the smallest difference between receipt and frame time, so that times continue
across engine restarts and machines. An absent engine leaves a gap. Data of earlier epochs is retained.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvscope_app.session.device_log import DeviceLog
from kvscope_app.session.event_log import EventLog, LoggedEvent
from kvscope_app.session.latency_window import LatencyWindow
from kvscope_app.session.request_times import RequestTimes
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import DeviceSample, MemoryBreakdown, Reading
from kvscope_telemetry.source import Update
from kvscope_telemetry.summaries.histograms import UNKNOWN_RANGE, PercentileBounds, sum_histograms
from kvscope_telemetry.summaries.summary import TimedEvent

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
NONE: Final = -(1 << 62)
BIN_NS: Final = 100_000_000
MAX_SILENCE_NS: Final = 1_600_000_000
"""Maximum time in ns without a message before curves get a gap. Heartbeats arrive every 0.5 s."""
SUMS: Final = (
    "prefill_tokens",
    "decode_tokens",
    "num_steps",
    "schedule_ns",
    "run_ns",
    "forward_ns",
    "commit_ns",
    "record_ns",
    "preemptions",
    "prompt_tokens",
    "cached_tokens",
    "evicted_blocks",
    "copied_blocks",
    "draft_tokens",
    "accepted_tokens",
)
"""Columns of `HistoryWindow` with the total of each time bin."""
KNOWN_SUMS: Final = ("run_ns", "cached_tokens", "evicted_blocks", "copied_blocks", "draft_tokens")
"""Sums that not every source provides. They are in `History.known_columns` once they were nonzero."""
FRAME_GAUGES: Final = ("num_running", "num_waiting")
BLOCK_GAUGES: Final = ("blocks_active", "blocks_cached", "blocks_free")
SAMPLE_GAUGES: Final = ("utilization", "power_watts", "temperature_celsius")
GAUGES: Final = FRAME_GAUGES + BLOCK_GAUGES + SAMPLE_GAUGES
"""Columns of `HistoryWindow` with the value at the end of each time bin."""
LATENCIES: Final = ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "queue_p50_s", "queue_p95_s")
"""Columns of `HistoryWindow` with latency percentiles measured in a time bin; NaN without measurements."""
_SERIES_TOTALS: Final = ("preemptions", "prompt_tokens", "cached_tokens")
_COUNTERS: Final = ("evicted_blocks", "copied_blocks", "draft_tokens", "accepted_tokens")
"""Cumulative totals that arrive once per update rather than with each frame."""
_TOTALS: Final = (*_SERIES_TOTALS, *_COUNTERS)
_PER_FRAME: Final = tuple(name for name in SUMS if name not in ("num_steps", *_TOTALS))
HISTOGRAMS: Final = {"ttft": "first_token", "itl": "inter_token", "queue": "queued"}
"""Kind of `Histogram` for each prefix of `LATENCIES`."""
_MAX_READINGS: Final = 256
_LATENCY_VALUES: Final = 32_768


class BlockCounts(Protocol):
    """Members of a `Mirror` that the history reads."""

    @property
    def epoch(self) -> int | None: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def used_share(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_available_blocks(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def num_cached(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """Consecutive time bins, oldest first. Values are NaN where nothing was received."""

    time_s: FloatArray
    """End of each bin in seconds relative to `end_ns`, shape (n,).

    Gauges are values at that time; sums cover the bin before it.
    """
    columns: dict[str, FloatArray]
    """Values of the bins by column name (`SUMS`, `GAUGES` and `LATENCIES`), shape (n,) each."""
    end_ns: int
    """Time 0 of `time_s` on this machine's monotonic clock."""
    bin_ns: int = BIN_NS
    is_complete: bool = False
    """Whether the newest bin is complete."""

    def rate(self, name: str) -> FloatArray:
        """Return the values of a column of `SUMS`, per second."""
        return self.columns[name] * (1e9 / self.bin_ns)

    def latest(self, name: str) -> float:
        """Return the newest known value of a column of `GAUGES` or `LATENCIES`; NaN if none is known."""
        column = self.columns[name]
        known_indexes = np.flatnonzero(np.isfinite(column))
        return float(column[known_indexes[-1]]) if known_indexes.size else np.nan


class History:
    """Recent history of one source for charts: values per time bin, events, latencies and device samples.

    It covers the last `max_seconds`, or a shorter time if that would take more than `max_bytes`.
    """

    def __init__(self, max_seconds: int = 600, max_bytes: int = 64 << 20) -> None:
        bytes_per_bin = 8 * len(SUMS + GAUGES + LATENCIES)
        num_bins = min(max_seconds * 1_000_000_000 // BIN_NS, max_bytes // 4 // bytes_per_bin)
        self._num_bins = max(num_bins, 2)
        self.events = EventLog(max(max_bytes // 4 // EventLog.BYTES_PER_EVENT, 1))
        self.samples: deque[DeviceSample] = deque(maxlen=max_seconds * 2)
        """Device samples in the order of receipt."""
        self.devices = DeviceLog()
        self.past_sample: DeviceSample | None = None
        """Newest device sample before a seek, reconstructed from the summaries per second; None if unknown."""
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self.clear()

    def clear(self) -> None:
        """Remove all data. Call it before an update that does not continue the previous ones."""
        self.ring = BinRing(SUMS, GAUGES, self._num_bins, LATENCIES)
        self.events.clear()
        self.samples.clear()
        self.devices.clear()
        self.past_sample = None
        self.memory: MemoryBreakdown | None = None
        self.first_token = LatencyWindow(_LATENCY_VALUES)
        self.inter_token = LatencyWindow(_LATENCY_VALUES)
        self.queued = LatencyWindow(_LATENCY_VALUES // 8)
        self.readings: deque[tuple[int, Reading]] = deque(maxlen=_MAX_READINGS)
        """Metrics readings with their times of receipt in ns, newest last."""
        self.request_times = RequestTimes()
        self.epoch: int | None = None
        self._offset_ns: int | None = None
        self._last_message_ns = 0
        self._totals: dict[str, int] = {}
        self._last_step = -1
        self.began_engine_ns = 0
        """Time of the last `restart` on the engine's clock."""
        self.began_ns: int | None = None
        """Time of the last `restart`, or None. Earlier data was not observed directly, but filled in from the overview.
        """
        self.num_past_events = 0
        """Number of events in the log from before `began_ns`."""
        self.known_columns: set[str] = set()
        """Names of optional columns (`SAMPLE_GAUGES`, `KNOWN_SUMS`, latencies) that had a value at least once."""

    @property
    def max_seconds(self) -> float:
        return self.ring.num_bins * BIN_NS / 1e9

    @property
    def num_bytes(self) -> int:
        """Memory of the ring buffers in bytes. The events are counted with an upper estimate."""
        parts = (self.ring, self.first_token, self.inter_token, self.queued, self.request_times)
        return sum(part.num_bytes for part in parts) + len(self.events) * EventLog.BYTES_PER_EVENT

    def wall_ns(self, time_ns: int) -> int:
        """Convert a time on this machine's monotonic clock to nanoseconds since 1970."""
        return time_ns + self._wall_offset_ns

    @property
    def engine_wall_ns(self) -> int:
        """Offset in ns from the engine's clock to the wall clock."""
        return (self._offset_ns or 0) + self._wall_offset_ns

    def with_wall_time(self, entry: LoggedEvent) -> TimedEvent:
        return TimedEvent(self.wall_ns(entry.time_ns), entry.epoch, entry.event)

    def add_update(self, update: Update, mirror: BlockCounts, now_ns: int | None = None) -> None:
        """Add an update that `mirror` has already applied. `now_ns` is the time of receipt (default: now)."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        before_ns = self._last_message_ns
        self._update_epoch(update, mirror)
        self._update_clock_offset(update, now_ns)
        if update.snapshot or update.series or update.heartbeat:
            # Not for load progress of the next engine: the mirror still has the state of the previous one.
            self.ring.advance(now_ns // BIN_NS, carry=now_ns - self._last_message_ns <= MAX_SILENCE_NS)
            self._last_message_ns = now_ns
            self._add_blocks(mirror, now_ns // BIN_NS)
        self._add_snapshot_counts(update, now_ns // BIN_NS)
        self._add_frames(update, now_ns)
        if not mirror.capabilities.counters:
            self._clear_sums(before_ns, now_ns)
        self._add_latencies(update, now_ns)
        self._add_readings(update, mirror, now_ns)
        self._add_requests(update)
        self.request_times.add_events(update.events)
        self.events.extend(update.events, self.epoch or 0, self._offset_ns or 0)
        self._add_samples(update.samples, now_ns // BIN_NS)
        self._add_devices(update, now_ns)
        self.memory = update.memory or self.memory

    def restart(self, update: Update, mirror: BlockCounts, now_ns: int) -> None:
        """Restart at `now_ns` with the state of `update`, which `mirror` has already applied.

        Sums and events before `now_ns` are not counted; `backfill_history` adds them from the overview.
        """
        self.clear()
        self.began_ns = now_ns
        self._update_epoch(update, mirror)
        self._update_clock_offset(update, now_ns)
        reported_ns = update.series["time_ns"][-1:].tolist() if update.series else []
        self._last_step = int(update.series["step"][-1]) if update.series else self._last_step
        self.began_engine_ns = max([*reported_ns, update.snapshot.time_ns if update.snapshot else 0])
        counters = update.counters or (update.snapshot.counters if update.snapshot else None)
        bin_number = now_ns // BIN_NS
        self.ring.advance(bin_number, carry=False)
        self._last_message_ns = now_ns
        self._add_blocks(mirror, bin_number)
        if counters is not None:
            self._totals = {name: getattr(counters, name) for name in _TOTALS}
            self.ring.set_bin(bin_number, {name: getattr(counters, name) for name in FRAME_GAUGES})
        if update.snapshot:
            self.request_times.add_snapshot(update.snapshot.requests)
        for rows in update.requests:
            self.request_times.add_snapshot(rows)
        self._add_samples(update.samples, bin_number)
        self._add_devices(update, now_ns)
        self.memory = update.memory

    def window(self, seconds: float, now_ns: int | None = None, names: Iterable[str] | None = None) -> HistoryWindow:
        """Return the last `seconds` before `now_ns` (default: now), with all columns or only those in `names`."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        last = now_ns // BIN_NS
        first = last - max(int(seconds * 1e9) // BIN_NS, 1)
        numbers = np.arange(first, last + 1)
        time_s = (((numbers + 1) * BIN_NS - now_ns) / 1e9).astype(np.float64)
        return HistoryWindow(time_s, self.ring.read(first, last, names), now_ns)

    def _clear_sums(self, since_ns: int, now_ns: int) -> None:
        """Set the sums since `since_ns` to NaN, so that curves show a gap rather than zero."""
        newest_bin = now_ns // BIN_NS
        bins = np.arange(max(min(since_ns // BIN_NS + 1, newest_bin), newest_bin - self._num_bins), newest_bin + 1)
        self.ring.set(bins, dict.fromkeys(SUMS, np.full(bins.size, np.nan)))

    def _update_epoch(self, update: Update, mirror: BlockCounts) -> None:
        epoch = update.snapshot.hello.epoch if update.snapshot else mirror.epoch
        if epoch != self.epoch:
            self.epoch = epoch
            self._offset_ns = None
            self._totals = {}
            self.memory = None
            self.request_times.clear()
        if update.snapshot:
            self._last_step = update.snapshot.step
        if update.snapshot and not self._totals:  # kept on a resync, so that increases in lost frames are counted
            counters = update.snapshot.counters
            self._totals = {name: getattr(counters, name) for name in _TOTALS}

    def _update_clock_offset(self, update: Update, now_ns: int) -> None:
        times = update.series.get("time_ns")
        newest_ns = [] if times is None else times[-1:].tolist()
        if update.heartbeat is not None:
            newest_ns.append(update.heartbeat.time_ns)
        if not newest_ns:
            return
        offset_ns = now_ns - max(newest_ns)
        self._offset_ns = offset_ns if self._offset_ns is None else min(self._offset_ns, offset_ns)

    def _add_snapshot_counts(self, update: Update, bin_number: int) -> None:
        """Set the request counts of a snapshot, which arrives before the first frame."""
        if update.snapshot:
            counters = update.snapshot.counters
            self.ring.set_bin(bin_number, {name: getattr(counters, name) for name in FRAME_GAUGES})

    def _add_frames(self, update: Update, now_ns: int) -> None:
        series = update.series
        if "time_ns" not in series or not series["time_ns"].size:
            return
        ends_ns = np.minimum(series["time_ns"] + (self._offset_ns or 0), now_ns)
        bins = ends_ns // BIN_NS
        sums: dict[str, IntArray] = {name: series[name] for name in _PER_FRAME}
        steps = series["step"]  # a frame sent between steps repeats the previous step's number
        sums["num_steps"] = (np.diff(steps, prepend=self._last_step) != 0).astype(np.int64)
        self._last_step = int(steps[-1])
        self._add_steps(ends_ns, series["schedule_ns"] + series["run_ns"] + series["commit_ns"], sums)
        sums.update({name: self._increase(name, series[name]) for name in _SERIES_TOTALS})
        self.ring.add_sums(bins, {name: sums[name] for name in _SERIES_TOTALS})
        if update.counters is not None:
            increases = {name: self._increase(name, np.array([getattr(update.counters, name)])) for name in _COUNTERS}
            self.ring.add_sums(bins[-1:], increases)
            sums.update(increases)
        self.known_columns.update(name for name in KNOWN_SUMS if name in sums and sums[name].any())
        self.ring.set(bins, {name: series[name] for name in FRAME_GAUGES})
        # The frames may belong to an earlier bin: the newest values hold until now.
        newest_bin = now_ns // BIN_NS
        later_bins = np.arange(
            max(int(bins[-1]), newest_bin - self._num_bins), newest_bin + 1
        )  # bounded: engine times may be arbitrary
        self.ring.set(later_bins, {name: np.full(later_bins.size, series[name][-1]) for name in FRAME_GAUGES})

    def _add_steps(self, ends_ns: IntArray, lengths_ns: IntArray, sums: Mapping[str, IntArray]) -> None:
        """Add the sums of steps, spread evenly over each step's duration.

        Otherwise a long step would show as a spike between zeros.
        """
        begins_ns = np.maximum(ends_ns - np.maximum(lengths_ns, 0), self.began_ns or NONE)
        is_long = begins_ns // BIN_NS < ends_ns // BIN_NS
        self.ring.add_sums(ends_ns[~is_long] // BIN_NS, {name: column[~is_long] for name, column in sums.items()})
        for index in np.flatnonzero(is_long).tolist():
            values = {name: float(column[index]) for name, column in sums.items()}
            self.ring.spread_sums(int(begins_ns[index]), int(ends_ns[index]), values)

    @property
    def offset_ns(self) -> int:
        """Offset to add to the engine's clock to get this machine's monotonic clock; 0 while unknown."""
        return self._offset_ns or 0

    @property
    def newest_sample(self) -> DeviceSample | None:
        return self.samples[-1] if self.samples else self.past_sample

    def _add_samples(self, samples: Iterable[DeviceSample], bin_number: int) -> None:
        """Add device samples. A value of -1 means unknown and leaves the bin as it is."""
        for sample in samples:
            self.samples.append(sample)
            values = {name: float(getattr(sample, name)) for name in SAMPLE_GAUGES if getattr(sample, name) >= 0}
            self.ring.set_bin(min(bin_number, self.ring.newest), values)
            self.known_columns.update(values)

    def _add_devices(self, update: Update, now_ns: int) -> None:
        for devices in update.devices:
            at_ns = now_ns if self._offset_ns is None else min(devices.time_ns + self._offset_ns, now_ns)
            self.devices.append(devices, at_ns)

    def _increase(self, name: str, totals: IntArray) -> IntArray:
        """Return the increase of a cumulative total in each frame, shape of `totals`.

        The first increase is 0 if no earlier total is known.
        """
        before = self._totals.get(name, int(totals[0]))
        self._totals[name] = int(totals[-1])
        steps = np.empty_like(totals)
        steps[0] = totals[0] - before
        np.subtract(totals[1:], totals[:-1], out=steps[1:])
        return np.maximum(steps, 0, out=steps)

    def _add_latencies(self, update: Update, now_ns: int) -> None:
        queued_ns = [e.data.waited_ns for e in update.events if e.kind == "admitted" and e.data is not None]
        if queued_ns:
            self.known_columns.add("queue_p50_s")
        for prefix, window, values in (
            ("ttft", self.first_token, update.first_token_ns),
            ("itl", self.inter_token, update.inter_token_ns),
            ("queue", self.queued, np.array(queued_ns, np.int64)),
        ):
            closed_bin = window.add(values, now_ns, now_ns // BIN_NS)
            if closed_bin is not None:
                bin_number, p50, p95 = closed_bin
                self.ring.set_bin(bin_number, {f"{prefix}_p50_s": p50, f"{prefix}_p95_s": p95})

    def _add_readings(self, update: Update, mirror: BlockCounts, now_ns: int) -> None:
        """Add the pool's usage, and latencies that the engine reports as histograms.

        The curves show the upper bound of each percentile, or the lower bound if the upper one is infinite.
        """
        for reading in update.readings:
            at_ns = now_ns if self._offset_ns is None else min(reading.time_ns + self._offset_ns, now_ns)
            bin_number = min(at_ns // BIN_NS, self.ring.newest)
            self.readings.append((at_ns, reading))
            if reading.used_share >= 0 and not mirror.capabilities.free_rows:
                self._set_usage(reading.used_share, mirror.num_blocks, bin_number)
            for prefix, kind in HISTOGRAMS.items():
                histogram = sum_histograms((reading,), kind)
                if histogram is not None and histogram.total:
                    bounds = {f"{prefix}_p{p}_s": histogram.percentile(p / 100) for p in (50, 95)}
                    upper = {name: high if math.isfinite(high) else low for name, (low, high) in bounds.items()}
                    self.ring.set_bin(bin_number, upper)
                    self.known_columns.update(upper)

    def percentile_bounds(self, prefix: str, share: float, since_ns: int, until_ns: int) -> PercentileBounds:
        """Return the bounds of a percentile of the latencies that were reported as histograms between two times.

        `prefix` is a key of `HISTOGRAMS`; `share` is 0 to 1.
        """
        readings = (reading for at_ns, reading in self.readings if since_ns <= at_ns <= until_ns)
        histogram = sum_histograms(readings, HISTOGRAMS[prefix])
        return UNKNOWN_RANGE if histogram is None else histogram.percentile(share)

    def _add_requests(self, update: Update) -> None:
        if update.snapshot:
            self.request_times.add_snapshot(update.snapshot.requests)
        times, reported_ns, first = update.series.get("time_ns"), update.request_time_ns, 0
        newest_ns = int(times[-1]) if times is not None else 0
        for rows in update.requests:
            last = first + len(rows.number) // 4
            self.request_times.add_rows(rows, reported_ns[first:last] if reported_ns.size else newest_ns)
            first = last

    def _add_blocks(self, mirror: BlockCounts, bin_number: int) -> None:
        if mirror.epoch is None:
            return
        if not mirror.capabilities.free_rows:
            if mirror.used_share >= 0:
                self._set_usage(mirror.used_share, mirror.num_blocks, bin_number)
        else:
            counts = (mirror.num_active, mirror.num_cached, mirror.num_available_blocks)
            self.ring.set_bin(bin_number, dict(zip(BLOCK_GAUGES, counts, strict=True)))

    def _set_usage(self, share: float, num_blocks: int, bin_number: int) -> None:
        active = share * num_blocks
        self.ring.set_bin(bin_number, {"blocks_active": active, "blocks_free": num_blocks - active})


class BinRing:
    """Ring buffer of fixed time bins, one row of a 2-D array per column.

    A bin has an absolute number (`time_ns // BIN_NS`); the ring retains the newest `num_bins`. Sums are totals within a
    bin. Gauges are values at its end and carry over to the next bin. Points are values measured within a bin and do not
    carry over. A bin without data is NaN: a gap in a curve, never zero.
    """

    def __init__(self, sums: Sequence[str], gauges: Sequence[str], num_bins: int, points: Sequence[str] = ()) -> None:
        self.num_bins = num_bins
        self.newest = NONE
        """Absolute number of the newest bin, or `NONE`. Negative for times before this machine's boot."""
        self._num_sums = len(sums)
        self._gauges = slice(len(sums), len(sums) + len(gauges))
        """Rows of the 2-D array with the gauges, whose values carry over from bin to bin."""
        self._row = {name: row for row, name in enumerate((*sums, *gauges, *points))}
        self._data = np.full((len(self._row), num_bins), np.nan)

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def advance(self, bin_number: int, *, carry: bool) -> None:
        """Make `bin_number` the newest bin. Does nothing if it is not newer.

        With `carry`, skipped bins get zero sums and the last gauges; otherwise they become NaN.
        """
        if bin_number <= self.newest:
            return
        first = max(self.newest + 1, bin_number - self.num_bins + 1) if self.newest != NONE else bin_number
        new_slots = np.arange(first, bin_number + 1) % self.num_bins
        gauges = self._data[self._gauges, self.newest % self.num_bins].copy()
        self._data[:, new_slots] = np.nan
        if carry and self.newest != NONE:
            self._data[: self._num_sums, new_slots] = 0.0
            self._data[self._gauges, new_slots] = gauges[:, None]
        else:
            self._data[: self._num_sums, new_slots[-1]] = 0.0
        self.newest = bin_number

    def add_sums(self, bin_numbers: IntArray, values: Mapping[str, IntArray]) -> None:
        """Add one entry per frame, shape (n,), to the sums. Entries of bins that have left the ring are dropped."""
        if not bin_numbers.size:
            return
        columns = np.stack(list(values.values()))
        rows = np.array([self._row[name] for name in values])
        for number in range(max(int(bin_numbers.min()), self.newest - self.num_bins + 1), self.newest + 1):
            is_in_bin = bin_numbers == number
            if is_in_bin.any():
                slot = number % self.num_bins
                before = self._data[rows, slot]
                before[np.isnan(before)] = 0.0
                self._data[rows, slot] = before + columns[:, is_in_bin].sum(axis=1)

    def spread_sums(self, begin_ns: int, end_ns: int, values: Mapping[str, float]) -> None:
        """Add `values` to the sums, spread evenly over the known bins from `begin_ns` to `end_ns`.

        `begin_ns` must be in an earlier bin than `end_ns`.
        """
        last = end_ns // BIN_NS
        numbers = np.arange(max(begin_ns // BIN_NS, self.newest - self.num_bins + 1), min(last, self.newest) + 1)
        is_known = np.isfinite(self._data[self._row[next(iter(values))], numbers % self.num_bins])
        numbers = numbers[is_known | (numbers == last)]
        if not numbers.size:
            return
        starts = np.maximum(numbers * BIN_NS, begin_ns)
        lengths = (np.minimum((numbers + 1) * BIN_NS, end_ns) - starts).astype(np.float64)
        shares = lengths / lengths.sum() if lengths.any() else np.full(numbers.size, 1 / numbers.size)
        for name, value in values.items():
            row, slots = self._row[name], numbers % self.num_bins
            self._data[row, slots] = np.nan_to_num(self._data[row, slots]) + value * shares

    def set(self, bin_numbers: IntArray, values: Mapping[str, IntArray | FloatArray]) -> None:
        """Set values of columns, shape (n,), oldest first. The last value in a bin overwrites earlier ones."""
        is_in_ring = (bin_numbers > self.newest - self.num_bins) & (bin_numbers <= self.newest)
        slots = bin_numbers[is_in_ring] % self.num_bins
        for name, column in values.items():
            self._data[self._row[name], slots] = column[is_in_ring]

    def set_bin(self, bin_number: int, values: Mapping[str, float]) -> None:
        """Set values of one bin, if the bin is in the ring."""
        if self.newest - self.num_bins < bin_number <= self.newest:
            for name, value in values.items():
                self._data[self._row[name], bin_number % self.num_bins] = value

    def read(self, first: int, last: int, names: Iterable[str] | None = None) -> dict[str, FloatArray]:
        """Return the values of the bins `first` to `last` inclusive, by column (all, or those in `names`). NaN outside
        the ring.
        """
        numbers = np.arange(first, last + 1)
        is_in_ring = (numbers > self.newest - self.num_bins) & (numbers <= self.newest)
        slots = numbers % self.num_bins
        column_names = self._row if names is None else names
        return {name: np.where(is_in_ring, self._data[self._row[name], slots], np.nan) for name in column_names}
