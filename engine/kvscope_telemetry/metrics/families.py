"""Creates metric families of prometheus_client with an engine's labels and creation times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from kvscope_telemetry.metrics.histogram import PrometheusHistogram

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Maker:
    """Creates families whose samples all carry `labels`; counters started at `created_s`, Unix time in seconds."""

    labels: Labels
    created_s: float

    def gauge(self, name: str, text: str, *values: tuple[Labels, float]) -> Metric:
        """Return a gauge with one sample per entry of `values`, each with additional labels."""
        family = GaugeMetricFamily(name, text)
        for own, value in values:
            family.add_sample(name, {**self.labels, **own}, value)
        return family

    def counter(self, name: str, text: str, *values: tuple[Labels, float]) -> Metric:
        """Return a counter with one sample per entry of `values`; `name` is without `_total`."""
        family = CounterMetricFamily(name, text)
        for own, value in values:
            labels = {**self.labels, **own}
            family.add_sample(f"{name}_total", labels, value)
            family.add_sample(f"{name}_created", labels, self.created_s)
        return family

    def histogram(self, name: str, text: str, histogram: PrometheusHistogram, created_s: float) -> Metric:
        """Return a histogram that started at `created_s`, Unix time in seconds."""
        family = HistogramMetricFamily(name, text, labels=tuple(self.labels))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, histogram.cumulative()), strict=True))
        family.add_metric(tuple(self.labels.values()), buckets, histogram.sum)
        family.add_sample(f"{name}_created", dict(self.labels), created_s)
        return family
