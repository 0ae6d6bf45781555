"""The values of a metrics page for one data-parallel rank, whichever engine and version wrote it.

What a page does not say is None, never 0. Knows no engine's names: those are in the engines' modules, which read a page
with what is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.external.page import MAX_COUNT, ScrapedPage
from kvscope_telemetry.messages.telemetry import Histogram, MetricFigure

MAX_BOUNDS: Final = 512
_LONGEST_S: Final = 1e9
GIB: Final = 1 << 30
MAX_SIZE: Final = 1 << 40
"""Larger sizes of pools and blocks are unknown: their products would not fit an i64."""
MAX_OF_LABEL: Final = 12
"""Figures that differ in a label."""
MAX_LABEL_LETTERS: Final = 40


@dataclass(frozen=True, slots=True)
class EngineReading:
    """At one moment. Counters are totals since the engine started."""

    model: str = ""
    num_running: int | None = None
    num_waiting: int | None = None
    used_share: float | None = None
    """Of the pool's blocks, 0 to 1."""
    num_blocks: int | None = None
    block_size: int | None = None
    """Of a vLLM with several KV groups, the least of theirs."""
    pool_tokens: int | None = None
    """Of requests, that the pool has room for."""
    cache_dtype: str = ""
    prompt_tokens: int | None = None
    """With those from the prefix cache, unlike `Counters.prompt_tokens`."""
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    """Guessed ahead and checked, and those of them that were right."""
    accepted_tokens: int | None = None
    finished: int | None = None
    aborted: int | None = None
    evicted_tokens: int | None = None
    host_tokens: int | None = None
    """That host memory has room for."""
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    graphs_bytes: int | None = None
    started_s: float | None = None
    """When the server's process began, seconds since 1970."""
    inside: str = ""
    """Where kvscope tells of this engine from inside it (`kvscope_inside`); empty where it does not say so."""
    latencies: dict[str, Cumulative] = field(default_factory=dict)
    """By the kind that `Histogram` has."""
    figures: tuple[MetricFigure, ...] = ()
    """What else there is, shown as it is."""

    @property
    def totals(self) -> tuple[int | None, ...]:
        """What only ever grows while an engine runs."""
        first_tokens = self.latencies.get("first_token")
        of_times = None if first_tokens is None else first_tokens.total
        return self.prompt_tokens, self.generation_tokens, self.preemptions, self.finished, of_times

    def is_restart_of(self, before: EngineReading) -> bool:
        """Whether the engine started anew since `before`: what only grows is less."""
        if None not in (self.started_s, before.started_s) and self.started_s != before.started_s:
            return True
        pairs = zip(self.totals, before.totals, strict=True)
        return any(now is not None and then is not None and now < then for now, then in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureMetric:
    """A metric that is shown as a `MetricFigure`."""

    name: str
    metric: str
    """A gauge, or a counter with its `_total`."""
    unit: str = ""
    by: str = ""
    """A label: there is a figure for each of its values, but for those that are 0."""
    is_mean: bool = False
    """Of a histogram's samples since the engine started."""
    needs: tuple[str, ...] = ()
    """It is left out while all of these are 0: an engine tells of pools that it has not."""


def read_figures(page: ScrapedPage, metrics: tuple[FigureMetric, ...]) -> tuple[MetricFigure, ...]:
    """Those of `metrics` that are on the page, in this order."""
    return tuple(chain.from_iterable([_figures_of(page, metric) for metric in metrics]))


def _figures_of(page: ScrapedPage, of: FigureMetric) -> Iterator[MetricFigure]:
    if of.needs and not any(page.sum_of(name) for name in of.needs):
        return
    if of.by:
        values = {
            f"{of.name}: {label[:MAX_LABEL_LETTERS]}": value
            for label, value in page.by_label(of.metric, of.by)
            if value
        }
    elif of.is_mean:
        total, number = page.sum_of(f"{of.metric}_sum"), page.sum_of(f"{of.metric}_count")
        values = {of.name: total / number} if total is not None and number else {}
    else:
        total = page.gauge(of.metric) if of.unit == "share" else page.sum_of(of.metric)
        values = {} if total is None else {of.name: total}
    for name, value in list(values.items())[:MAX_OF_LABEL]:
        yield MetricFigure(name=name, value=value, unit=of.unit, metric=of.metric)


def read_latencies(page: ScrapedPage, *kinds: tuple[str, ...]) -> dict[str, Cumulative]:
    """Each a kind that `Histogram` has, and the names that its histogram has in older and newer versions."""
    found: dict[str, Cumulative] = {}
    for kind, *names in kinds:
        for name in names:
            histogram = Cumulative.of_buckets(page.buckets(name))
            if histogram is not None:
                found[kind] = histogram
                break
    return found


def count(value: float | None) -> int | None:
    """Return a whole number; None for a value that is no count."""
    return None if value is None or not 0 <= value <= MAX_COUNT else round(value)


def number(value: float | str | None) -> int | None:
    """Return a size, a whole number above 0; None for "None" and the like."""
    try:
        found = float(value) if value not in (None, "") else math.nan
    except ValueError:
        return None
    return int(found) if 1 <= found <= MAX_SIZE else None


def share(value: float | None) -> float | None:
    """Of 1."""
    return None if value is None or value < 0 else min(value, 1.0)


def gib(value: float | None) -> int | None:
    """Bytes of so many GiB."""
    return None if value is None or not 0 <= value * GIB <= MAX_COUNT else round(value * GIB)


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Histograms as a page of metrics has them: how many were at most so long, ever; and what was added between two
    pages.

    A histogram gives bounds, not samples: no sample is ever made up here.

    `counts[i]` were at most `bounds_s[i]`; the last count is of all, and has no bound.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_buckets(cls, buckets: dict[float, float]) -> Cumulative | None:
        """Of upper bounds in seconds and how many were at most that; None for what is no histogram."""
        bounds = sorted(buckets)
        if len(bounds) < 2 or len(bounds) > MAX_BOUNDS or bounds[-1] != math.inf or not bounds[0] > 0:
            return None
        counts = [buckets[bound] for bound in bounds]
        if not all(0 <= number <= MAX_COUNT for number in counts) or any(a > b for a, b in pairwise(counts)):
            return None
        finite = tuple(bound for bound in bounds[:-1] if bound <= _LONGEST_S)
        return cls(finite, (*map(int, counts[: len(finite)]), int(counts[-1])))

    @property
    def total(self) -> int:
        """How many there were."""
        return self.counts[-1]

    def since(self, before: Cumulative | None, kind: str) -> Histogram | None:
        """What was added since `before`, an interval each; None where nothing was, or they cannot be compared."""
        if before is None or before.bounds_s != self.bounds_s:
            return None
        added = np.diff(np.array(self.counts) - np.array(before.counts), prepend=0)
        if not added.any() or added.min() < 0:
            return None
        bounds = np.rint(np.array(self.bounds_s) * 1e9).astype("<u8")
        return Histogram(kind=kind, bounds_ns=bounds.tobytes(), counts=added.astype("<u8").tobytes())
