"""What happened lately: bounded rings by time and bytes, fed with updates, read by the views. No Qt.

The clock is this machine's monotonic one; a recording's times are on it as well, negative from before the boot. Frame
times of an epoch are moved onto it by the smallest difference seen between receipt and frame, so times go on over
engine restarts and across machines; an engine that was away leaves a gap. Nothing of an older epoch is thrown away.
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
from kvscope_telemetry.summaries.histograms import UNKNOWN_RANGE, PercentileBounds, joined
from kvscope_telemetry.summaries.summary import TimedEvent

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
NONE: Final = -(1 << 62)
BIN_NS: Final = 100_000_000
MAX_SILENCE_NS: Final = 1_600_000_000
"""Longer without any message and the curve has a gap. Heartbeats come every half second."""
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
"""Columns of `HistoryWindow` that count what happened in a bin."""
KNOWN_SUMS: Final = ("run_ns", "cached_tokens", "evicted_blocks", "copied_blocks", "draft_tokens")
"""Those that not every source has: `History.known` has them once they were not zero."""
FRAME_GAUGES: Final = ("num_running", "num_waiting")
BLOCK_GAUGES: Final = ("blocks_active", "blocks_cached", "blocks_free")
SAMPLE_GAUGES: Final = ("utilization", "power_watts", "temperature_celsius")
GAUGES: Final = FRAME_GAUGES + BLOCK_GAUGES + SAMPLE_GAUGES
"""Columns that say how things stood at the end of a bin."""
LATENCIES: Final = ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "queue_p50_s", "queue_p95_s")
"""Columns that were measured in a bin; where nobody waited there is none."""
_SERIES_TOTALS: Final = ("preemptions", "prompt_tokens", "cached_tokens")
_COUNTERS: Final = ("evicted_blocks", "copied_blocks", "draft_tokens", "accepted_tokens")
"""Totals that are told with an update alone, not with each of its frames."""
_TOTALS: Final = (*_SERIES_TOTALS, *_COUNTERS)
_PER_FRAME: Final = tuple(name for name in SUMS if name not in ("num_steps", *_TOTALS))
HISTOGRAMS: Final = {"ttft": "first_token", "itl": "inter_token", "queue": "queued"}
"""What latencies begin with among `LATENCIES`, and their kinds of `Histogram`."""
_MAX_READINGS: Final = 256
_LATENCY_VALUES: Final = 32_768


class BlockCounts(Protocol):
    """What the history asks of a mirror."""

    @property
    def epoch(self) -> int | None: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def used_share(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_room(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def num_cached(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """Bins from `-seconds` to now, oldest first; NaN where nothing was heard."""

    time_s: FloatArray
    """End of each bin relative to the reading, shape (n,): gauges are as of then, sums are of the bin before."""
    columns: dict[str, FloatArray]
    """`SUMS`, `GAUGES` and `LATENCIES`, shape (n,) each."""
    end_ns: int
    """This machine's monotonic time at 0."""
    bin_ns: int = BIN_NS
    """How long each bin is."""
    is_over: bool = False
    """Whether nothing comes to the newest bin any more."""

    def rate(self, name: str) -> FloatArray:
        """A column of `SUMS` per second."""
        return self.columns[name] * (1e9 / self.bin_ns)

    def latest(self, name: str) -> float:
        """The newest known value of a gauge or latency, NaN when there is none."""
        column = self.columns[name]
        known = np.flatnonzero(np.isfinite(column))
        return float(column[known[-1]]) if known.size else np.nan


class History:
    """The last `max_seconds`, or as much of them as fits into `max_bytes`."""

    def __init__(self, max_seconds: int = 600, max_bytes: int = 64 << 20) -> None:
        bytes_per_bin = 8 * len(SUMS + GAUGES + LATENCIES)
        num_bins = min(max_seconds * 1_000_000_000 // BIN_NS, max_bytes // 4 // bytes_per_bin)
        self._num_bins = max(num_bins, 2)
        self.events = EventLog(max(max_bytes // 4 // EventLog.BYTES_PER_EVENT, 1))
        self.samples: deque[DeviceSample] = deque(maxlen=max_seconds * 2)
        """Device samples as they came, newest last."""
        self.devices = DeviceLog()
        """All GPUs and the host."""
        self.past_sample: DeviceSample | None = None
        """After a jump: what the device said of itself last before it, as far as a second's summary tells."""
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        self.clear()

    def clear(self) -> None:
        """Forget everything, because what comes next does not continue it."""
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
        """Readings of metrics as they came, with the time of receipt, newest last."""
        self.request_times = RequestTimes()
        self.epoch: int | None = None
        self._offset_ns: int | None = None
        self._last_heard_ns = 0
        self._totals: dict[str, int] = {}
        self._step = -1
        self.began_engine_ns = 0
        """The same moment as `began_ns` by the engine's clock."""
        self.began_ns: int | None = None
        """Where it began anew (`begin`): what was before that it did not see itself."""
        self.num_past_events = 0
        """Events in the log from before that."""
        self.known: set[str] = set()
        """Of what not every source has (`SAMPLE_GAUGES`, `KNOWN_SUMS`, `queue_p50_s`), what was told at least once."""

    @property
    def max_seconds(self) -> float:
        """How far back the ring reaches."""
        return self.ring.num_bins * BIN_NS / 1e9

    @property
    def num_bytes(self) -> int:
        """Memory of the rings, an upper bound for the events."""
        parts = (self.ring, self.first_token, self.inter_token, self.queued, self.request_times)
        return sum(part.num_bytes for part in parts) + len(self.events) * EventLog.BYTES_PER_EVENT

    def wall_ns(self, time_ns: int) -> int:
        """Nanoseconds since 1970 of a time on this machine's monotonic clock."""
        return time_ns + self._wall_offset_ns

    @property
    def engine_wall_ns(self) -> int:
        """Offset from the engine's clock to the wall clock of `wall_ns`, in nanoseconds."""
        return (self._offset_ns or 0) + self._wall_offset_ns

    def timed(self, entry: LoggedEvent) -> TimedEvent:
        """An event of the log by the wall clock."""
        return TimedEvent(self.wall_ns(entry.time_ns), entry.epoch, entry.event)

    def add_update(self, update: Update, mirror: BlockCounts, now_ns: int | None = None) -> None:
        """Take in an update that `mirror` has applied already. `now_ns` is the time of receipt, for tests."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        before_ns = self._last_heard_ns
        self._follow_epoch(update, mirror)
        self._follow_clock(update, now_ns)
        if update.snapshot or update.series or update.heartbeat:
            # And not how the load of the next engine goes, while the mirror still shows the last one.
            self.ring.advance(now_ns // BIN_NS, carry=now_ns - self._last_heard_ns <= MAX_SILENCE_NS)
            self._last_heard_ns = now_ns
            self._add_blocks(mirror, now_ns // BIN_NS)
        self._add_standing(update, now_ns // BIN_NS)
        self._add_frames(update, now_ns)
        if not mirror.capabilities.counters:
            self._forget_sums(before_ns, now_ns)
        self._add_latencies(update, now_ns)
        self._add_readings(update, now_ns)
        self._add_requests(update)
        self.request_times.hear(update.events)
        self.events.extend(update.events, self.epoch or 0, self._offset_ns or 0)
        self._add_samples(update.samples, now_ns // BIN_NS)
        self._add_devices(update, now_ns)
        self.memory = update.memory or self.memory

    def begin(self, update: Update, mirror: BlockCounts, now_ns: int) -> None:
        """Begin anew with the state at `now_ns`, which `update` tells and the mirror has. Of what led there nothing is
        counted: `past.fill_past` knows it."""
        self.clear()
        self.began_ns = now_ns
        self._follow_epoch(update, mirror)
        self._follow_clock(update, now_ns)
        told_ns = update.series["time_ns"][-1:].tolist() if update.series else []
        self._step = int(update.series["step"][-1]) if update.series else self._step
        self.began_engine_ns = max([*told_ns, update.snapshot.time_ns if update.snapshot else 0])
        counters = update.counters or (update.snapshot.counters if update.snapshot else None)
        bin_number = now_ns // BIN_NS
        self.ring.advance(bin_number, carry=False)
        self._last_heard_ns = now_ns
        self._add_blocks(mirror, bin_number)
        if counters is not None:
            self._totals = {name: getattr(counters, name) for name in _TOTALS}
            self.ring.put_one(bin_number, {name: getattr(counters, name) for name in FRAME_GAUGES})
        if update.snapshot:
            self.request_times.skip(update.snapshot.requests)
        for rows in update.requests:
            self.request_times.skip(rows)
        self._add_samples(update.samples, bin_number)
        self._add_devices(update, now_ns)
        self.memory = update.memory

    def window(self, seconds: float, now_ns: int | None = None, names: Iterable[str] | None = None) -> HistoryWindow:
        """The last `seconds`, up to now: all columns, or `names`."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        last = now_ns // BIN_NS
        first = last - max(int(seconds * 1e9) // BIN_NS, 1)
        numbers = np.arange(first, last + 1)
        time_s = (((numbers + 1) * BIN_NS - now_ns) / 1e9).astype(np.float64)
        return HistoryWindow(time_s, self.ring.read(first, last, names), now_ns)

    def _forget_sums(self, since_ns: int, now_ns: int) -> None:
        """Make what was counted since then unknown: a gap in curves, not zero."""
        now = now_ns // BIN_NS
        bins = np.arange(max(min(since_ns // BIN_NS + 1, now), now - self._num_bins), now + 1)
        self.ring.put(bins, dict.fromkeys(SUMS, np.full(bins.size, np.nan)))

    def _follow_epoch(self, update: Update, mirror: BlockCounts) -> None:
        epoch = update.snapshot.hello.epoch if update.snapshot else mirror.epoch
        if epoch != self.epoch:
            self.epoch = epoch
            self._offset_ns = None
            self._totals = {}
            self.memory = None
            self.request_times.clear()
        if update.snapshot:
            self._step = update.snapshot.step
        if update.snapshot and not self._totals:  # a resync keeps them: what was lost is counted as well
            counters = update.snapshot.counters
            self._totals = {name: getattr(counters, name) for name in _TOTALS}

    def _follow_clock(self, update: Update, now_ns: int) -> None:
        times = update.series.get("time_ns")
        if times is not None and times.size:
            seen = now_ns - int(times[-1])
        elif update.heartbeat is not None:
            seen = now_ns - update.heartbeat.time_ns
        else:
            return
        self._offset_ns = seen if self._offset_ns is None else min(self._offset_ns, seen)

    def _add_standing(self, update: Update, bin_number: int) -> None:
        """A snapshot says how many requests there are before any frame does."""
        if update.snapshot:
            counters = update.snapshot.counters
            self.ring.put_one(bin_number, {name: getattr(counters, name) for name in FRAME_GAUGES})

    def _add_frames(self, update: Update, now_ns: int) -> None:
        series = update.series
        if "time_ns" not in series or not series["time_ns"].size:
            return
        ends_ns = np.minimum(series["time_ns"] + (self._offset_ns or 0), now_ns)
        bins = ends_ns // BIN_NS
        sums: dict[str, IntArray] = {name: series[name] for name in _PER_FRAME}
        steps = series["step"]  # a frame that tells what changed without a step has the number of the step before
        sums["num_steps"] = (np.diff(steps, prepend=self._step) != 0).astype(np.int64)
        self._step = int(steps[-1])
        self._add_steps(ends_ns, series["schedule_ns"] + series["run_ns"] + series["commit_ns"], sums)
        sums.update({name: self._increase(name, series[name]) for name in _SERIES_TOTALS})
        self.ring.add(bins, {name: sums[name] for name in _SERIES_TOTALS})
        if update.counters is not None:
            counted = {name: self._increase(name, np.array([getattr(update.counters, name)])) for name in _COUNTERS}
            self.ring.add(bins[-1:], counted)
            sums.update(counted)
        self.known.update(name for name in KNOWN_SUMS if name in sums and sums[name].any())
        self.ring.put(bins, {name: series[name] for name in FRAME_GAUGES})
        # Frames of an earlier bin came late: how they left things holds until now.
        now = now_ns // BIN_NS
        since = np.arange(max(int(bins[-1]), now - self._num_bins), now + 1)  # an engine's time may be any
        self.ring.put(since, {name: np.full(since.size, series[name][-1]) for name in FRAME_GAUGES})

    def _add_steps(self, ends_ns: IntArray, lengths_ns: IntArray, sums: Mapping[str, IntArray]) -> None:
        """Add what steps computed, evenly over the time in which each ran: a long one makes no spike between zeros."""
        begins_ns = np.maximum(ends_ns - np.maximum(lengths_ns, 0), self.began_ns or NONE)
        is_long = begins_ns // BIN_NS < ends_ns // BIN_NS
        self.ring.add(ends_ns[~is_long] // BIN_NS, {name: column[~is_long] for name, column in sums.items()})
        for place in np.flatnonzero(is_long).tolist():
            values = {name: float(column[place]) for name, column in sums.items()}
            self.ring.spread(int(begins_ns[place]), int(ends_ns[place]), values)

    @property
    def offset_ns(self) -> int:
        """Our monotonic clock less that of the engine that is shown; 0 before anything is known of it."""
        return self._offset_ns or 0

    @property
    def newest_sample(self) -> DeviceSample | None:
        """What the device said of itself last."""
        return self.samples[-1] if self.samples else self.past_sample

    def _add_samples(self, samples: Iterable[DeviceSample], bin_number: int) -> None:
        """What is unknown (-1) is no value."""
        for sample in samples:
            self.samples.append(sample)
            values = {name: float(getattr(sample, name)) for name in SAMPLE_GAUGES if getattr(sample, name) >= 0}
            self.ring.put_one(min(bin_number, self.ring.newest), values)
            self.known.update(values)

    def _add_devices(self, update: Update, now_ns: int) -> None:
        for devices in update.devices:
            at_ns = now_ns if self._offset_ns is None else min(devices.time_ns + self._offset_ns, now_ns)
            self.devices.add(devices, at_ns)

    def _increase(self, name: str, totals: IntArray) -> IntArray:
        """Steps of a total since the frame before; a total seen for the first time counts as none."""
        before = self._totals.get(name, int(totals[0]))
        self._totals[name] = int(totals[-1])
        steps = np.empty_like(totals)
        steps[0] = totals[0] - before
        np.subtract(totals[1:], totals[:-1], out=steps[1:])
        return np.maximum(steps, 0, out=steps)

    def _add_latencies(self, update: Update, now_ns: int) -> None:
        queued = [e.data.waited_ns for e in update.events if e.kind == "admitted" and e.data is not None]
        if queued:
            self.known.add("queue_p50_s")
        for prefix, window, values in (
            ("ttft", self.first_token, update.first_token_ns),
            ("itl", self.inter_token, update.inter_token_ns),
            ("queue", self.queued, np.array(queued, np.int64)),
        ):
            closed = window.add(values, now_ns, now_ns // BIN_NS)
            if closed is not None:
                bin_number, p50, p95 = closed
                self.ring.put_one(bin_number, {f"{prefix}_p50_s": p50, f"{prefix}_p95_s": p95})

    def _add_readings(self, update: Update, now_ns: int) -> None:
        """Latencies that are told as histograms: of a percentile the curve has the upper bound."""
        for reading in update.readings:
            self.readings.append((now_ns, reading))
            for prefix, kind in HISTOGRAMS.items():
                histogram = joined((reading,), kind)
                if histogram is not None and histogram.total:
                    bounds = {f"{prefix}_p{p}_s": histogram.percentile(p / 100) for p in (50, 95)}
                    upper = {name: high if math.isfinite(high) else low for name, (low, high) in bounds.items()}
                    self.ring.put_one(min(now_ns // BIN_NS, self.ring.newest), upper)
                    self.known.update(upper)

    def range_of(self, prefix: str, share: float, since_ns: int, until_ns: int) -> PercentileBounds:
        """Return the bounds of a percentile of the latencies told as histograms between two times."""
        readings = (reading for at_ns, reading in self.readings if since_ns <= at_ns <= until_ns)
        histogram = joined(readings, HISTOGRAMS[prefix])
        return UNKNOWN_RANGE if histogram is None else histogram.percentile(share)

    def _add_requests(self, update: Update) -> None:
        if update.snapshot:
            self.request_times.skip(update.snapshot.requests)
        times, told_ns, first = update.series.get("time_ns"), update.request_time_ns, 0
        newest_ns = int(times[-1]) if times is not None else 0
        for rows in update.requests:
            last = first + len(rows.number) // 4
            self.request_times.add(rows, told_ns[first:last] if told_ns.size else newest_ns)
            first = last

    def _add_blocks(self, mirror: BlockCounts, bin_number: int) -> None:
        if mirror.epoch is None:
            return
        if not mirror.capabilities.free_rows:
            if mirror.used_share >= 0:
                active = mirror.used_share * mirror.num_blocks
                self.ring.put_one(bin_number, {"blocks_active": active, "blocks_free": mirror.num_blocks - active})
        else:
            counts = (mirror.num_active, mirror.num_cached, mirror.num_room)
            self.ring.put_one(bin_number, dict(zip(BLOCK_GAUGES, counts, strict=True)))


class BinRing:
    """A ring of fixed time bins, one row of a 2-D array a column. Owns the storage and the gaps.

    A bin has an absolute number (`time_ns // bin_ns`); the ring keeps the newest `num_bins`. Sums count what
    happened inside a bin, gauges say how things stood at its end, points were measured in it and say nothing of the
    next. A bin nobody reported on is NaN: a gap in a curve, never a zero.

    Columns `sums + gauges + points` over the newest `num_bins` bins.
    """

    def __init__(self, sums: Sequence[str], gauges: Sequence[str], num_bins: int, points: Sequence[str] = ()) -> None:
        self.num_bins = num_bins
        self.newest = NONE
        """Absolute number of the newest bin, `NONE` while there is none. Before this machine's boot it is negative."""
        self._num_sums = len(sums)
        self._gauges = slice(len(sums), len(sums) + len(gauges))
        """The rows that go on from bin to bin."""
        self._row = {name: row for row, name in enumerate((*sums, *gauges, *points))}
        self._data = np.full((len(self._row), num_bins), np.nan)

    @property
    def num_bytes(self) -> int:
        """Memory of the ring."""
        return self._data.nbytes

    def advance(self, bin_number: int, *, carry: bool) -> None:
        """Make `bin_number` the newest bin. Bins on the way hold zero sums and the gauges before them
        when `carry`, NaN otherwise. An older number changes nothing."""
        if bin_number <= self.newest:
            return
        first = max(self.newest + 1, bin_number - self.num_bins + 1) if self.newest != NONE else bin_number
        fresh = np.arange(first, bin_number + 1) % self.num_bins
        gauges = self._data[self._gauges, self.newest % self.num_bins].copy()
        self._data[:, fresh] = np.nan
        if carry and self.newest != NONE:
            self._data[: self._num_sums, fresh] = 0.0
            self._data[self._gauges, fresh] = gauges[:, None]
        else:
            self._data[: self._num_sums, fresh[-1]] = 0.0
        self.newest = bin_number

    def add(self, bin_numbers: IntArray, values: Mapping[str, IntArray]) -> None:
        """Add one entry a frame, shape (n,), to the sums. Bins that left the ring are dropped."""
        if not bin_numbers.size:
            return
        columns = np.stack(list(values.values()))
        rows = np.array([self._row[name] for name in values])
        for number in range(max(int(bin_numbers.min()), self.newest - self.num_bins + 1), self.newest + 1):
            inside = bin_numbers == number
            if inside.any():
                slot = number % self.num_bins
                before = self._data[rows, slot]
                before[np.isnan(before)] = 0.0
                self._data[rows, slot] = before + columns[:, inside].sum(axis=1)

    def spread(self, begin_ns: int, end_ns: int, values: Mapping[str, float]) -> None:
        """Add `values` to the sums, evenly over the time from `begin_ns` to `end_ns`, as far as the ring has known bins
        of it. `begin_ns` is before the bin in which `end_ns` lies.
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

    def put(self, bin_numbers: IntArray, values: Mapping[str, IntArray | FloatArray]) -> None:
        """Set gauges or points, shape (n,), oldest first; the last of a bin stands."""
        inside = (bin_numbers > self.newest - self.num_bins) & (bin_numbers <= self.newest)
        slots = bin_numbers[inside] % self.num_bins
        for name, column in values.items():
            self._data[self._row[name], slots] = column[inside]

    def put_one(self, bin_number: int, values: Mapping[str, float]) -> None:
        """Set gauges or points of one bin."""
        if self.newest - self.num_bins < bin_number <= self.newest:
            for name, value in values.items():
                self._data[self._row[name], bin_number % self.num_bins] = value

    def read(self, first: int, last: int, names: Iterable[str] | None = None) -> dict[str, FloatArray]:
        """Columns (all, or `names`) over bins `first` to `last` inclusive; NaN outside what the ring holds."""
        numbers = np.arange(first, last + 1)
        held = (numbers > self.newest - self.num_bins) & (numbers <= self.newest)
        slots = numbers % self.num_bins
        wanted = self._row if names is None else names
        return {name: np.where(held, self._data[self._row[name], slots], np.nan) for name in wanted}
