"""Queries a Prometheus server: which engines it knows, and the samples of their scrapes.

Samples are read with range selectors (`metric[5m]`), which return them unchanged with the times of their scrapes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlencode

import msgspec

from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.http_client import HttpClient, NoAnswer
from kvscope_telemetry.collectors.prometheus.prometheus_address import INSTANCE, PrometheusAddress
from kvscope_telemetry.collectors.scraped_page import MAX_SAMPLES, RAY_PREFIX, Samples
from kvscope_telemetry.errors import ProtocolError

LOOKBACK_S: Final = 300
"""Seconds of the past in which an engine that runs was scraped."""
MAX_INSTANCES: Final = 512
TIMEOUT_S: Final = 30.0
MAX_BYTES: Final = 64 << 20
_PROCESS_START: Final = "process_start_time_seconds"
_QUERY: Final = "/api/v1/query"
_NS: Final = 1_000_000_000


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str] = (0.0, "")
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Data


class _Scalar(msgspec.Struct):
    result: tuple[float, str]


class _ScalarAnswer(msgspec.Struct):
    data: _Scalar


class PrometheusClient:
    """Client of the server at `address`. Raises BadInput if its certificate file cannot be used.

    Methods raise NoAnswer without an answer, and ProtocolError for an answer that is not Prometheus'.
    """

    def __init__(self, address: PrometheusAddress) -> None:
        self.address = address
        self._http = HttpClient(address, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES)

    def cancel(self) -> None:
        """Cancel all requests, current and future. Thread-safe."""
        self._http.cancel()

    def server_time_ns(self) -> int:
        """Return the server's clock, in nanoseconds since 1970. Samples have times on this clock."""
        content = self._get("time()")
        try:
            return round(float(msgspec.json.decode(content, type=_ScalarAnswer).data.result[1]) * _NS)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            raise ProtocolError(_not_prometheus()) from None

    def find_engines(self, *, past_s: int = 0) -> list[tuple[ExternalEngine, dict[str, str]]]:
        """Return the engines that were scraped in the last `LOOKBACK_S` seconds or, if there are none, in the last
        `past_s` seconds, each with its labels `job` and `instance`, sorted by them; at most `MAX_INSTANCES`.
        """
        return self._find_engines(LOOKBACK_S) or (self._find_engines(past_s) if past_s > LOOKBACK_S else [])

    def _find_engines(self, lookback_s: int) -> list[tuple[ExternalEngine, dict[str, str]]]:
        found: dict[tuple[str, str], ExternalEngine] = {}
        for engine in external_engines.ENGINES:
            selector = f"{{{_names_matcher([engine.metrics_prefix])}{self._matchers}}}"
            query = f"count by (job, {INSTANCE}) (last_over_time({selector}[{lookback_s}s]))"
            for series in self._series(query):
                found.setdefault((series.metric.get("job", ""), series.metric.get(INSTANCE, "")), engine)
        engines = sorted(found.items(), key=lambda item: item[0])[:MAX_INSTANCES]
        return [(engine, {"job": job, INSTANCE: instance}) for (job, instance), engine in engines]

    def scrapes(
        self, engine: ExternalEngine, labels: dict[str, str], *, seconds: int, until_ns: int
    ) -> list[tuple[int, Samples]]:
        """Return the samples of each scrape in the `seconds` before `until_ns`, with the time of the scrape in
        nanoseconds since 1970, oldest first.
        """
        prefixes = [engine.metrics_prefix, *engine.other_prefixes]
        matchers = self.address.of_engine(labels).matchers
        query = f"{{{_names_matcher(prefixes, _PROCESS_START)},{matchers}}}[{seconds}s]"
        return _by_scrape(self._series(query, until_ns))

    @property
    def _matchers(self) -> str:
        matchers = self.address.matchers
        return f",{matchers}" if matchers else ""

    def _series(self, query: str, time_ns: int | None = None) -> list[_Series]:
        content = self._get(query, time_ns)
        try:
            answer = msgspec.json.decode(content, type=_Answer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise ProtocolError(_not_prometheus()) from None
        return answer.data.result

    def _get(self, query: str, time_ns: int | None = None) -> bytes:
        options = {"query": query} | ({} if time_ns is None else {"time": f"{time_ns / _NS:.3f}"})
        encoded = f"?{urlencode(options)}"
        try:
            kind, content = self._http.get(f"{_QUERY}{encoded}")
        except NoAnswer as error:  # a query is long, and means nothing to the user
            raise NoAnswer(str(error).replace(encoded, ""), error.status) from None
        if kind != "application/json":
            raise ProtocolError(_not_prometheus())
        return content


def _names_matcher(prefixes: Iterable[str], *names: str) -> str:
    """Return a matcher for metrics whose names begin with one of `prefixes`, also as Ray Serve exports them.

    The creation times that Prometheus' client library exports for each counter are left out: they are as many as the
    counters and not used.
    """
    patterns = [
        f"(ray_)?{re.escape(prefix[:-1])}[:_].+" if prefix.endswith(":") else f"{prefix}.+" for prefix in prefixes
    ]
    return f'__name__=~"{"|".join([*patterns, *names])}",__name__!~".+_created"'


def _by_scrape(all_series: list[_Series]) -> list[tuple[int, Samples]]:
    if len(all_series) > MAX_SAMPLES:
        raise ProtocolError(f"the selection has {len(all_series)} series: up to {MAX_SAMPLES} are read")
    scrapes: defaultdict[int, Samples] = defaultdict(dict)
    for series in all_series:
        labels = {name: value for name, value in series.metric.items() if name != "__name__"}
        name = RAY_PREFIX.sub(r"\1:", series.metric.get("__name__", ""))
        for time_s, text in series.values:
            value = _number(text)
            if math.isfinite(value) and math.isfinite(time_s):
                scrapes[round(time_s * _NS)].setdefault(name, []).append((labels, value))
    return sorted(scrapes.items())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _not_prometheus() -> str:
    return "it does not answer like Prometheus: is it another program's port?"
