"""Overview of a session: all summarized seconds as columns, oldest first.

Owns the columns and the memory limit. The numbers of all seconds are retained. Compressed address bins are retained for
as many evenly spaced seconds as fit into the limit. Used by one thread. Must not depend on files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvscope_telemetry.latencies import LATENCIES
from kvscope_telemetry.messages.validity import MAX_I64
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.request_phases import PhaseLog
from kvscope_telemetry.summaries.summary import SECOND_NS, AddressBins, Latency, Summary, TimedEvent

Packed = tuple[bytes, ...]
"""Compressed columns of address bins in the order of `AddressBins`; b"" for a column without bins."""

NOTHING: Final[Packed] = (b"",) * len(AddressBins.__struct_fields__)
_COLUMN_INDEX: Final = {name: index for index, name in enumerate(AddressBins.__struct_fields__)}
_LEVEL: Final = 1
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
MAX_BIN_BYTES: Final = 48 << 20
"""Memory limit of the compressed address bins, enough for many hours. Longer overviews retain the bins of every
second, then every fourth second, and so on.
"""
_LATENCIES: Final = tuple(latency.key for latency in LATENCIES)
_QUANTILES: Final = ("count", "p50_s", "p95_s", "p99_s", "p50_above_s", "p95_above_s", "p99_above_s")
_NOT_NUMBERS: Final = (
    *("time_ns", "epoch", "free_runs", "bins", "phases", "moments", "stops", "carried_step"),
    *_LATENCIES,
)
SCALARS: Final = tuple(name for name in Summary.__struct_fields__ if name not in _NOT_NUMBERS)
_DISTRIBUTED: Final = ("prefill_tokens", "decode_tokens")
OVERVIEW_COLUMNS: Final = (
    *SCALARS,
    *(f"{latency}_{part}" for latency in _LATENCIES for part in _QUANTILES),
    *(f"{name}_per_s" for name in _DISTRIBUTED),
)
"""Names of an overview's columns: numbers of `Summary`, latency quantiles such as `first_token_p50_s`, and token rates.

In the rates, the tokens of a step are divided among the seconds in which it ran, so that steps longer than a second do
not appear as spikes between zeros.
"""
_MAX_STEP_NS: Final = 86_400 * SECOND_NS
_MAX_STOPS_PER_SECOND: Final = 1_000
"""Maximum number of engine stops accepted per second. A user cannot cause more."""
_DTYPES: Final = {"owner": np.dtype("<i4")}


class SessionOverview:
    """Collects summaries in time order. A summary of a second that the overview already contains replaces that
    second and removes all later ones.
    """

    def __init__(self, max_bin_bytes: int = MAX_BIN_BYTES) -> None:
        self.events = EventIndex()
        self.phases = PhaseLog()
        self.stops = RunningTime()
        """Stops of the engine on the recording's clock."""
        self.moments = PhaseLog()
        """When requests first ran and got their first token, on their engine's clock; each row's kind is a
        `RequestMoment`.
        """
        self.version = 0
        self._max_bin_bytes = max_bin_bytes
        self._size = 0
        self._times = np.empty(64, np.int64)
        self._epochs = np.empty(64, np.int64)
        self._columns = np.empty((len(OVERVIEW_COLUMNS), 64))
        self._packer = BinPacker()
        self._bins: list[Packed | None] = []
        """Compressed address bins per second; None if they are those of the previous second."""
        self._free_runs: list[tuple[int, ...]] = []
        self._buckets: list[tuple[bytes, ...]] = []
        self._carried: list[FloatArray | None] = []
        """Tokens of each second's first completed step that were moved to earlier seconds, shape (2, number of
        earlier seconds). Row 0 is prefill, row 1 decode.
        """
        self._bin_bytes = 0
        self._stride = 1

    def __len__(self) -> int:
        return self._size

    @property
    def time_ns(self) -> IntArray:
        """Start of each second on the recording's clock, shape (n,). Seconds without data are left out."""
        return self._times[: self._size]

    @property
    def epoch(self) -> IntArray:
        return self._epochs[: self._size]

    @property
    def num_bytes(self) -> int:
        return self._columns.nbytes + self._times.nbytes + self._epochs.nbytes + self._bin_bytes

    def column(self, name: str) -> FloatArray:
        """Return one of `OVERVIEW_COLUMNS`, shape (n,); NaN for unknown values."""
        return self._columns[OVERVIEW_COLUMNS.index(name), : self._size]

    def free_runs(self, index: int) -> tuple[int, ...]:
        return self._free_runs[index]

    def latency_buckets(self, latency: str, index: int) -> bytes:
        return self._buckets[index][_LATENCIES.index(latency)]

    def index_at(self, time_ns: int) -> int:
        """Return the index of the newest second that started at or before `time_ns`, or -1."""
        return int(np.searchsorted(self.time_ns, time_ns, "right")) - 1

    def bins(self, name: str, indices: IntArray) -> npt.NDArray[np.generic]:
        """Return a column of `AddressBins` for the seconds at `indices`, shape (len(indices), bins).

        The number of bins is that of the newest second that has any. Seconds without bins, and index -1, yield 0 (-1
        for the owner).
        """
        dtype = _DTYPES.get(name, np.dtype(np.uint8))
        rows = [np.frombuffer(self._packer.column(bins, name), dtype) for bins in self._bins_of(indices.tolist())]
        num_bins = next((row.size for row in reversed(rows) if row.size), 0)
        table = np.full((len(rows), num_bins), -1 if name == "owner" else 0, dtype)
        for target, row in zip(table, rows, strict=True):
            if row.size == num_bins:
                target[:] = row
            elif row.size:  # from another engine start, with another pool size
                target[:] = row[np.arange(num_bins) * row.size // num_bins]
        return table

    def extend(self, summaries: Iterable[Summary], events: Iterable[TimedEvent] = ()) -> None:
        for summary in summaries:
            self._add(summary)
            self.phases.add(summary.phases, summary.epoch)
            for stop in summary.stops[-_MAX_STOPS_PER_SECOND:]:
                if 0 <= stop.begin_ns < stop.end_ns <= MAX_I64:
                    self.stops.add(stop)
            self.moments.add(summary.moments, summary.epoch)
            self.version += 1
        self.version += self.events.extend(events)

    def forget_before(self, time_ns: int) -> None:
        """Drop the seconds that ended at or before `time_ns`, and earlier events, phases and stops."""
        num_dropped = int(np.searchsorted(self.time_ns, time_ns - SECOND_NS, "right"))
        self.events.forget_before(time_ns)
        self.phases.forget_before(time_ns)
        self.stops.forget_before(time_ns)
        if not num_dropped:
            return
        first = self._bins_at(num_dropped) if num_dropped < self._size else None
        self._bin_bytes -= sum(num_bytes(bins) for bins in self._bins[:num_dropped])
        del (
            self._bins[:num_dropped],
            self._free_runs[:num_dropped],
            self._buckets[:num_dropped],
            self._carried[:num_dropped],
        )
        if self._bins and self._bins[0] is None:
            self._bins[0] = first
            self._bin_bytes += num_bytes(first)
        remaining = slice(num_dropped, self._size)
        self._size -= num_dropped
        for array in (self._times, self._epochs):
            array[: self._size] = array[remaining].copy()
        self._columns[:, : self._size] = self._columns[:, remaining].copy()
        self.version += 1

    def _add(self, summary: Summary) -> None:
        while self._size and self._times[self._size - 1] >= summary.time_ns:
            self._drop_last()
        self._reserve()
        self._times[self._size], self._epochs[self._size] = summary.time_ns, summary.epoch
        self._columns[:, self._size] = _numbers(summary)
        self._size += 1
        self._carried.append(self._distribute_carried_step(summary))
        self._free_runs.append(summary.free_runs)
        self._buckets.append(tuple(getattr(summary, name).buckets for name in _LATENCIES))
        is_kept = self._size % self._stride == 0 or self._size == 1
        self._bins.append(self._packer.pack(summary.bins) if summary.bins is not None and is_kept else None)
        self._bin_bytes += num_bytes(self._bins[-1])
        if self._bin_bytes > self._max_bin_bytes:
            self._thin_out()

    def _distribute_carried_step(self, summary: Summary) -> FloatArray | None:
        """Move tokens of the step that the newest second completed to the earlier seconds in which the step
        ran, as far as the overview has them. Returns the moved tokens.
        """
        step, index = summary.carried_step, self._size - 1
        if step is None or not 0 < step.before_ns <= step.length_ns <= _MAX_STEP_NS:
            return None
        max_seconds = -(-step.before_ns // SECOND_NS)
        times, epochs = (
            self._times[max(index - max_seconds, 0) : index][::-1],
            self._epochs[max(index - max_seconds, 0) : index][::-1],
        )
        ages = np.arange(1, times.size + 1)
        is_consecutive = (times == summary.time_ns - ages * SECOND_NS) & (epochs == summary.epoch)
        ages = ages[: int(np.argmin(np.append(is_consecutive, False)))]
        if not ages.size:
            return None
        parts = np.minimum(step.before_ns - (ages - 1) * SECOND_NS, SECOND_NS).astype(np.float64)
        shares = parts[::-1] / (parts.sum() + step.length_ns - step.before_ns)
        carried: FloatArray = np.array([[step.prefill_tokens], [step.decode_tokens]], np.float64) * shares
        self._move(carried, index)
        return carried

    def _move(self, carried: FloatArray, index: int) -> None:
        """Subtract the tokens in `carried` from the rates of the second at `index`, and add them to the rates
        of the seconds before it.
        """
        columns = self._columns[-len(_DISTRIBUTED) :]
        num_before = min(carried.shape[1], index)
        columns[:, index - num_before : index] += carried[:, carried.shape[1] - num_before :]
        columns[:, index] -= carried.sum(axis=1)

    def _drop_last(self) -> None:
        carried = self._carried.pop()
        if carried is not None:
            self._move(-carried, self._size - 1)
        self._size -= 1
        self._free_runs.pop()
        self._buckets.pop()
        self._bin_bytes -= num_bytes(self._bins.pop())

    def _reserve(self) -> None:
        if self._size == self._times.size:
            self._times, self._epochs = (np.concatenate((a, np.empty_like(a))) for a in (self._times, self._epochs))
            self._columns = np.concatenate((self._columns, np.empty_like(self._columns)), axis=1)

    def _thin_out(self) -> None:
        self._stride *= 2
        with_bins = [index for index, bins in enumerate(self._bins) if bins is not None]
        for index in with_bins[1::2]:
            self._bin_bytes -= num_bytes(self._bins[index])
            self._bins[index] = None

    def _bins_of(self, indices: list[int]) -> Iterator[Packed]:
        """Yield the address bins of the second at each index. If indices are ascending, no second is inspected
        twice, even where bins rarely change.
        """
        previous, current = -1, NOTHING
        for index in indices:
            own_bins = self._bins[index] if index >= 0 else None
            if own_bins is not None:
                current = own_bins
            elif previous < 0 or index < previous:
                current = self._bins_at(index)
            else:
                newer = (self._bins[at] for at in range(index, previous, -1))
                current = next((bins for bins in newer if bins is not None), current)
            previous = index
            yield current

    def _bins_at(self, index: int) -> Packed:
        while index >= 0:
            bins = self._bins[index]
            if bins is not None:
                return bins
            index -= 1
        return NOTHING


def _numbers(summary: Summary) -> list[float]:
    numbers = [float(getattr(summary, name)) for name in SCALARS]
    numbers = [np.nan if number < 0 else number for number in numbers]  # negative values mean unknown
    for name in _LATENCIES:
        latency: Latency = getattr(summary, name)
        numbers.append(float(latency.count))
        parts = [getattr(latency, name) for name in _QUANTILES[1:]]
        numbers += [part if latency.count and part >= 0 else np.nan for part in parts]
    return numbers + [numbers[SCALARS.index(name)] for name in _DISTRIBUTED]


class BinPacker:
    """Compresses the columns of address bins, and reuses the previous result if a column did not change. Each
    overview and thread needs its own instance.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()
        self._last = AddressBins()
        self._last_packed = NOTHING

    def pack(self, bins: AddressBins) -> Packed:
        """Compress the columns. For a column equal to that of the previous call, the same bytes object is
        returned again.
        """
        packed = tuple(
            before if column == last else self._compressor.compress(column)
            for column, last, before in zip(_columns(bins), _columns(self._last), self._last_packed, strict=True)
        )
        self._last, self._last_packed = bins, packed
        return packed

    def column(self, packed: Packed, name: str) -> bytes:
        column = packed[_COLUMN_INDEX[name]]
        return self._decompressor.decompress(column) if column else b""


def num_bytes(packed: Packed | None) -> int:
    """Return the size of compressed address bins in bytes, including columns shared with other seconds."""
    return 0 if packed is None else sum(map(len, packed))


def _columns(bins: AddressBins) -> Packed:
    return tuple(getattr(bins, name) for name in AddressBins.__struct_fields__)
