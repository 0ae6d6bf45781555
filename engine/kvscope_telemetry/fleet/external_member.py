"""Reads an external engine, or one of its ranks, for a fleet, with the same source and mirror that a window uses."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import Final

from kvscope_telemetry.addresses import WatchedSource
from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.fleet.own_member import CURRENT_STATES
from kvscope_telemetry.fleet.pool_bins import PoolBins, pool_bins
from kvscope_telemetry.fleet.rates import WINDOW_NS, Rates
from kvscope_telemetry.messages.telemetry import Reading
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.summaries.histograms import sum_histograms

_MAX_READINGS: Final = 600


class ExternalMember:
    def __init__(self, entry: FleetEntry, source: WatchedSource) -> None:
        self._entry, self._source = entry, source
        self._rates = Rates()
        self._readings: deque[tuple[int, Reading]] = deque(maxlen=_MAX_READINGS)
        self._bins: PoolBins | None = None
        self._bins_version = -1

    def poll(self) -> None:
        update = self._source.update_mirror()
        if update is None:
            return
        now_ns, mirror = time.monotonic_ns(), self._source.mirror
        if update.snapshot is not None:
            self._rates.begin()
        if mirror.hello is not None:
            self._rates.count(mirror.counters, now_ns)
        self._readings.extend((now_ns, reading) for reading in update.readings)
        while self._readings and now_ns - self._readings[0][0] > WINDOW_NS:
            self._readings.popleft()

    def row(self) -> FleetRow:
        status, mirror = self._source.status, self._source.mirror
        row = FleetRow(self._entry, status.state, status.reason, self._entry.address.scheme)
        hello = mirror.hello
        if hello is None:
            return row
        row = replace(row, version=hello.engine_version, model=hello.model.name)
        if status.state not in CURRENT_STATES:
            return row
        first_token_s = self._first_token_s()
        return replace(
            row,
            usage=_usage(mirror),
            num_running=mirror.counters.num_running if self._readings else None,
            num_waiting=mirror.counters.num_waiting if self._readings else None,
            first_token_s=first_token_s,
            is_first_token_bound=first_token_s is not None,
            hit_rate=self._rates.hit_rate(),
            preemptions_per_s=self._rates.preemptions_per_s() if self._readings else None,
            num_blocks=mirror.num_blocks or None,
            bins=self._current_bins(mirror),
        )

    def close(self) -> None:
        self._source.close()

    def _first_token_s(self) -> float | None:
        """Return an upper bound of the median time to first token in seconds; None if there were no first tokens."""
        buckets = sum_histograms((reading for _, reading in self._readings), "first_token")
        high = math.nan if buckets is None else buckets.percentile(0.5).high
        return high if math.isfinite(high) else None

    def _current_bins(self, mirror: Mirror) -> PoolBins | None:
        if mirror.version != self._bins_version:
            self._bins_version = mirror.version
            self._bins = pool_bins(mirror.ledger.state[: mirror.num_blocks])
        return self._bins


def _usage(mirror: Mirror) -> float | None:
    return mirror.used_share if mirror.used_share >= 0 else None
