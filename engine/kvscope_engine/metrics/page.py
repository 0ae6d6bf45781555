"""The page `/metrics`: a registry of its own, whose collector asks telemetry at each scrape.

The page is there while the engine is not: then `kvscope_up` is 0, counters stay where they were, and what would say
how things stand now is absent. Knows no engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvscope_engine.metrics import own_families, vllm_families
from kvscope_engine.metrics.engine_watch import EngineWatch, Look
from kvscope_engine.metrics.families import Maker
from kvscope_engine.metrics.tally import Tally

PATH: Final = "/metrics"
OPENMETRICS_TYPE: Final = "application/openmetrics-text"
ENGINE: Final = "0"
"""vLLM numbers its engines; ours is the first and only."""


class MetricsPage:
    """Of the engine at `endpoint`, which clients call `served_name` (empty: as it calls itself); to be closed.

    Raises BadInput for an endpoint or key that is not accepted.
    """

    def __init__(self, endpoint: str, *, key: Path | None = None, served_name: str = "") -> None:
        self._served_name = served_name
        self._watch = EngineWatch(endpoint, key=key)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for. Any thread."""
        look = self._watch.look()
        yield from own_families.listening(Maker({}, self._watch.began_s), look.status, is_up=look.is_up)
        sink = self._watch.sink
        with sink.lock:
            families = [] if sink.tally is None else list(self._families(sink.tally, look))
        yield from families

    def describe(self) -> list[Metric]:
        """Nothing is collected merely to be registered."""
        return []

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as `accept` (a header) asks: OpenMetrics, or Prometheus' text.

        All names are legal as they are: where told to escape, OpenMetrics' encoder would take colons out of samples.
        """
        _, content_type = choose_encoder(accept)
        if not content_type.startswith(OPENMETRICS_TYPE):
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        page: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self._registry, escaping=openmetrics.ALLOWUTF8
        )
        return page, f"{OPENMETRICS_TYPE}; version=1.0.0; charset=utf-8"

    def routes(self) -> list[BaseRoute]:
        """To be mounted. Starlette runs what is no coroutine beside its loop."""
        return [Route(PATH, self._answer, methods=["GET"])]

    def close(self) -> None:
        """Idempotent."""
        self._watch.close()

    def _answer(self, request: Request) -> Response:
        page, content_type = self.render(",".join(request.headers.getlist("accept")))
        return Response(page, headers={"Content-Type": content_type})

    def _families(self, tally: Tally, look: Look) -> Iterator[Metric]:
        labels = {"model_name": self._served_name or tally.hello.model.name, "engine": ENGINE}
        make = Maker(labels, tally.began_s)
        yield from vllm_families.counters_and_histograms(make, tally)
        yield from own_families.counters(make, tally)
        if look.pool is not None and look.pool.epoch == tally.hello.epoch:
            yield from vllm_families.gauges(make, tally, look.pool)
            yield from own_families.gauges(make, tally, look.pool)
