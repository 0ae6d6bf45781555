"""The page `/metrics`: a separate registry, whose collector reads the latest telemetry at each scrape.

The page is available even while the engine is not: then `kvscope_up` is 0, counters keep their values, and gauges of
the current state are absent. Does not use the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from kvscope_telemetry.messages.telemetry import DeviceSample, Frame, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.metrics import own_families, vllm_families
from kvscope_telemetry.metrics.families import Maker
from kvscope_telemetry.metrics.pool_figures import PoolFigures, pool_figures
from kvscope_telemetry.metrics.tally import Tally
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.live_source import LiveSource

UPDATE_INTERVAL_S: Final = 0.5
"""Seconds between two times at which received telemetry is applied to the mirror. Without this, telemetry would
accumulate until the next scrape.
"""
READER_SLEEP_S: Final = 0.1
"""Seconds that the reading thread sleeps after each pass. Scrapes do not need lower latency, and large batches of
frames cost the least.
"""
UP: Final = (SourceState.LIVE, SourceState.PAUSED, SourceState.STUCK)
"""Source states in which the engine runs, so that its latest values are current."""
PATH: Final = "/metrics"
OPENMETRICS_TYPE: Final = "application/openmetrics-text"
ENGINE: Final = "0"
"""Value of vLLM's label `engine`, which numbers engines; there is only one here."""


class MetricsPage:
    """Metrics of the engine at `endpoint`. Must be closed.

    Args:
        served_name: Model name that clients use. If empty, the engine's name for the model.
        with_vllm_names: Whether to include the metrics with vLLM's names. False if the engine itself serves a metrics
            page.

    Raises:
        BadInput: The endpoint or key is not accepted.
    """

    def __init__(
        self, endpoint: str, *, key: Path | None = None, served_name: str = "", with_vllm_names: bool = True
    ) -> None:
        self._served_name, self._with_vllm_names = served_name, with_vllm_names
        self._watch = EngineWatch(endpoint, key=key)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by prometheus_client on any thread."""
        scrape = self._watch.scrape()
        yield from own_families.connection_metrics(Maker({}, self._watch.began_s), scrape.status, is_up=scrape.is_up)
        sink = self._watch.sink
        with sink.lock:
            families = [] if sink.tally is None else list(self._families(sink.tally, scrape))
        yield from families

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering does not call `collect`."""
        return []

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, negotiated by the header `accept`: OpenMetrics or Prometheus text.

        All names are valid without escaping. With escaping, the OpenMetrics encoder would remove the colons of vLLM's
        names.
        """
        _, content_type = choose_encoder(accept)
        if not content_type.startswith(OPENMETRICS_TYPE):
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        page: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self._registry, escaping=openmetrics.ALLOWUTF8
        )
        return page, f"{OPENMETRICS_TYPE}; version=1.0.0; charset=utf-8"

    def close(self) -> None:
        self._watch.close()

    def _families(self, tally: Tally, scrape: Scrape) -> Iterator[Metric]:
        labels = {"model_name": self._served_name or tally.hello.model.name, "engine": ENGINE}
        make = Maker(labels, tally.began_s)
        is_current = scrape.pool is not None and scrape.pool.epoch == tally.hello.epoch
        if self._with_vllm_names:
            yield from vllm_families.counters_and_histograms(make, tally)
            if scrape.pool is not None and is_current:
                yield from vllm_families.gauges(make, tally, scrape.pool)
        yield from own_families.counters(make, tally)
        if scrape.pool is not None and is_current:
            yield from own_families.gauges(make, tally, scrape.pool)


# Watching an engine: one thread receives telemetry, one updates the mirror; a scrape reads the latest state.
#
# `EngineWatch` owns the source, the mirror and the tally, and the locks between these threads and those that scrape.
class TallySink:
    """Receives every message that the source accepts, in order, and keeps the tally of the newest epoch."""

    failure = ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Must be held to change or read the tally."""
        self.tally: Tally | None = None

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        with self.lock:
            if isinstance(message, Snapshot):
                self._apply_snapshot(message)
            elif self.tally is None or getattr(message, "epoch", None) != self.tally.hello.epoch:
                pass  # of an epoch without a snapshot
            elif isinstance(message, Frame):
                self.tally.frame(message)
            elif isinstance(message, MemoryBreakdown):
                self.tally.memory = message
            elif isinstance(message, DeviceSample):
                self.tally.sample = message
        return True

    def _apply_snapshot(self, snapshot: Snapshot) -> None:
        if self.tally is None or self.tally.hello.epoch != snapshot.hello.epoch:
            self.tally = Tally(snapshot, time.time())
        else:
            self.tally.snapshot(snapshot)


@dataclass(frozen=True, slots=True)
class Scrape:
    status: SourceStatus
    pool: PoolFigures | None
    """Figures of the pool; None while the engine is unreachable, and before its first snapshot."""

    @property
    def is_up(self) -> bool:
        return self.status.state in UP


class EngineWatch:
    """Watches the engine at `endpoint` across its restarts. Raises BadInput for an endpoint or key that is not
    accepted.
    """

    def __init__(self, endpoint: str, *, key: Path | None = None) -> None:
        self.sink = TallySink()
        self.began_s = time.time()
        self._mirror_lock = threading.Lock()
        self._closing = threading.Event()
        self._source = LiveSource(endpoint, key=key, sink=self.sink, nap_s=READER_SLEEP_S)
        self._thread = threading.Thread(target=self._run, name="kvscope-metrics", daemon=True)
        self._thread.start()

    def scrape(self) -> Scrape:
        with self._mirror_lock:
            self._update_mirror()
            status, mirror = self._source.status, self._source.mirror
            is_known = status.state in UP and mirror.hello is not None
            return Scrape(status, pool_figures(mirror) if is_known else None)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._source.close()

    def _run(self) -> None:
        while not self._closing.wait(UPDATE_INTERVAL_S):
            with self._mirror_lock:
                self._update_mirror()

    def _update_mirror(self) -> None:
        while self._source.update_mirror() is not None:
            pass
