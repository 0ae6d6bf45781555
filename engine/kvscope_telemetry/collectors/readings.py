"""Values of a metrics page for one data-parallel rank, independent of the engine and version that wrote it.

A value that is not on the page is None, never 0. The engines' modules, which define the metrics' names, read a page
with the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.collectors.scraped_page import MAX_COUNT, ScrapedPage
from kvscope_telemetry.messages.telemetry import Histogram, MetricFigure

MAX_BOUNDS: Final = 512
_MAX_BOUND_S: Final = 1e9
GIB: Final = 1 << 30
MAX_SIZE: Final = 1 << 40
"""Maximum size in blocks or tokens. Larger sizes count as unknown, because their products would overflow an i64."""
MAX_OF_LABEL: Final = 12
"""Maximum number of label values for which a metric that is split by a label (`FigureMetric.by`) is displayed."""
MAX_LABEL_LETTERS: Final = 40


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Metrics of one engine at one moment. Counters are totals since the engine started."""

    model: str = ""
    num_running: int | None = None
    num_waiting: int | None = None
    used_share: float | None = None
    """Fraction of the pool's blocks in use, 0 to 1."""
    num_blocks: int | None = None
    block_size: int | None = None
    """Tokens per block; for vLLM with several KV groups, those of the group with the smallest blocks."""
    pool_tokens: int | None = None
    """Number of tokens of requests that the KV pool can hold."""
    cache_dtype: str = ""
    prompt_tokens: int | None = None
    """Number of prompt tokens, including those from the prefix cache, unlike `Counters.prompt_tokens`."""
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    finished: int | None = None
    aborted: int | None = None
    evicted_tokens: int | None = None
    host_tokens: int | None = None
    """Capacity of the host cache in tokens."""
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    graphs_bytes: int | None = None
    started_s: float | None = None
    """Start time of the server process, seconds since 1970."""
    inside: str = ""
    """Address at which kvscope's plugin in this engine (`kvscope_inside`) publishes telemetry; empty without
    the plugin.
    """
    latencies: dict[str, Cumulative] = field(default_factory=dict)
    """Latency histograms by `Histogram.kind`."""
    figures: tuple[MetricFigure, ...] = ()
    """Other metrics, which are displayed unchanged."""

    @property
    def totals(self) -> tuple[int | None, ...]:
        """Counters that never decrease while an engine runs; None for those that it does not report."""
        first_tokens = self.latencies.get("first_token")
        num_latencies = None if first_tokens is None else first_tokens.total
        return self.prompt_tokens, self.generation_tokens, self.preemptions, self.finished, num_latencies

    def is_restart_of(self, before: EngineReading) -> bool:
        """Return whether the engine restarted since `before`: its start time differs, or a total is smaller."""
        if None not in (self.started_s, before.started_s) and self.started_s != before.started_s:
            return True
        pairs = zip(self.totals, before.totals, strict=True)
        return any(now is not None and then is not None and now < then for now, then in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureMetric:
    name: str
    metric: str
    """Name of a gauge, or of a counter including its suffix `_total`."""
    unit: str = ""
    by: str = ""
    """Label by which the metric is split into one figure for each value that is not 0; empty for a single figure."""
    is_mean: bool = False
    """Whether the figure is the mean of a histogram's samples since the engine started."""
    needs: tuple[str, ...] = ()
    """Metrics that show whether the engine has the feature. The figure is omitted while all of them are 0,
    because engines export metrics of pools that they do not have.
    """


def read_figures(page: ScrapedPage, metrics: tuple[FigureMetric, ...]) -> tuple[MetricFigure, ...]:
    return tuple(chain.from_iterable([_figures_of(page, metric) for metric in metrics]))


def _figures_of(page: ScrapedPage, figure: FigureMetric) -> Iterator[MetricFigure]:
    if figure.needs and not any(page.sum_of(name) for name in figure.needs):
        return
    if figure.by:
        values = {
            f"{figure.name}: {label[:MAX_LABEL_LETTERS]}": value
            for label, value in page.by_label(figure.metric, figure.by)
            if value
        }
    elif figure.is_mean:
        total, number = page.sum_of(f"{figure.metric}_sum"), page.sum_of(f"{figure.metric}_count")
        values = {figure.name: total / number} if total is not None and number else {}
    else:
        total = page.gauge(figure.metric) if figure.unit == "share" else page.sum_of(figure.metric)
        values = {} if total is None else {figure.name: total}
    for name, value in list(values.items())[:MAX_OF_LABEL]:
        yield MetricFigure(name=name, value=value, unit=figure.unit, metric=figure.metric)


def read_latencies(page: ScrapedPage, *kinds: tuple[str, ...]) -> dict[str, Cumulative]:
    """Read latency histograms, and return them by `Histogram.kind`.

    Args:
        kinds: For each histogram a tuple of its `Histogram.kind` and the names of its metric in different versions of
            the engine. The first name that is on the page is used.
    """
    latencies: dict[str, Cumulative] = {}
    for kind, *names in kinds:
        for name in names:
            histogram = Cumulative.of_buckets(page.buckets(name))
            if histogram is not None:
                latencies[kind] = histogram
                break
    return latencies


def count(value: float | None) -> int | None:
    """Round a count to an integer; None if it is negative or above `MAX_COUNT`."""
    return None if value is None or not 0 <= value <= MAX_COUNT else round(value)


def number(value: float | str | None) -> int | None:
    """Parse a size, an integer from 1 to `MAX_SIZE`; None for anything else, such as the text "None"."""
    try:
        parsed = float(value) if value not in (None, "") else math.nan
    except ValueError:
        return None
    return int(parsed) if 1 <= parsed <= MAX_SIZE else None


def share(value: float | None) -> float | None:
    """Limit a fraction to at most 1. Returns None if it is negative."""
    return None if value is None or value < 0 else min(value, 1.0)


def gib(value: float | None) -> int | None:
    return None if value is None or not 0 <= value * GIB <= MAX_COUNT else round(value * GIB)


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Cumulative histogram of a metrics page: `counts[i]` samples since the engine started were at most `bounds_s[i]`
    seconds.

    The last count has no bound and includes all samples.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_buckets(cls, buckets: dict[float, float]) -> Cumulative | None:
        """Create a histogram from a map of upper bounds in seconds to counts; None if the map is no valid histogram."""
        bounds = sorted(buckets)
        if len(bounds) < 2 or len(bounds) > MAX_BOUNDS or bounds[-1] != math.inf or not bounds[0] > 0:
            return None
        counts = [buckets[bound] for bound in bounds]
        if not all(0 <= number <= MAX_COUNT for number in counts) or any(a > b for a, b in pairwise(counts)):
            return None
        finite = tuple(bound for bound in bounds[:-1] if bound <= _MAX_BOUND_S)
        return cls(finite, (*map(int, counts[: len(finite)]), int(counts[-1])))

    @property
    def total(self) -> int:
        return self.counts[-1]

    def since(self, before: Cumulative | None, kind: str) -> Histogram | None:
        """Return the samples added since `before`, per interval instead of cumulative; None if there are none
        or the bounds differ.
        """
        if before is None or before.bounds_s != self.bounds_s:
            return None
        added = np.diff(np.array(self.counts) - np.array(before.counts), prepend=0)
        if not added.any() or added.min() < 0:
            return None
        bounds = np.rint(np.array(self.bounds_s) * 1e9).astype("<u8")
        return Histogram(kind=kind, bounds_ns=bounds.tobytes(), counts=added.astype("<u8").tobytes())
