"""Parses a page of Prometheus metrics to samples by name and label, of one data-parallel rank. Knows no engine's names.

Prometheus' own parser reads it. Lines of other programs on the same page are removed before that, because a page may be
large and the parser is slow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from kvscope_telemetry.errors import ProtocolError

MAX_SAMPLES: Final = 200_000
MAX_COUNT: Final = 1 << 53
"""Largest value of a count. Larger values count as unknown: their sums would not fit an i64."""
Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


class ScrapedPage:
    """One scrape of a metrics page: the samples whose names begin with one of `prefixes`, of one rank and of `model`.

    `rank` is the rank's label and number; samples without the label apply to all ranks. Samples that differ only in a
    label of `replicas` repeat the same value, and the first is used. Raises ProtocolError if `text` is not a page of
    metrics.
    """

    def __init__(
        self,
        text: str,
        prefixes: tuple[str, ...],
        *,
        rank: tuple[str, int] = ("", 0),
        replicas: tuple[str, ...] = (),
        model: str = "",
    ) -> None:
        self._samples = _of_rank(_samples(text, prefixes), rank, replicas, model)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._samples)

    def total(self, *names: str, where: Labels | None = None) -> int | None:
        """Return a counter's value over all its labels, under the first of `names` that is on the page.

        Returns None if none is, or if the value is not a count.
        """
        value = self.sum_of(*names, where=where)
        return None if value is None or not 0 <= value <= MAX_COUNT else int(value)

    def sum_of(self, *names: str, where: Labels | None = None) -> float | None:
        """Return the sum over all labels, under the first of `names` that is on the page."""
        for name in names:
            values = [value for labels, value in self._samples.get(name, ()) if _fits(labels, where)]
            if values:
                return sum(values)
        return None

    def by_label(self, name: str, label: str) -> list[tuple[str, float]]:
        """Return the sum for each value of `label`, in the page's order."""
        sums: dict[str, float] = {}
        for labels, value in self._samples.get(name, ()):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return list(sums.items())

    def gauge(self, *names: str) -> float | None:
        """Return a gauge's value. If it is also reported by priority, the value for all priorities is preferred."""
        for name in names:
            found = self._samples.get(name, ())
            of_all = [value for labels, value in found if not labels.get("priority")] or [v for _, v in found]
            if of_all:
                return of_all[0]
        return None

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's counts by upper bound, summed over all labels; empty if it is malformed."""
        found: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            try:
                found[float(labels["le"])] += value
            except (KeyError, ValueError):
                return {}
        return dict(found)

    def labels_of(self, name: str) -> Labels:
        """Return the labels of the first sample; empty if there is none."""
        found = self._samples.get(name)
        return found[0][0] if found else {}

    def label(self, label: str, *names: str) -> str:
        """Return the first value of `label` among `names`; empty if there is none."""
        return next((value for name in names if (value := self.labels_of(name).get(label, ""))), "")


def _fits(labels: Labels, where: Labels | None) -> bool:
    return where is None or all(labels.get(name) == value for name, value in where.items())


def _samples(text: str, prefixes: tuple[str, ...]) -> Samples:
    if text.lstrip()[:1] in ("<", "{"):
        raise ProtocolError("it is a web page, not metrics")
    lines = [line for line in text.splitlines() if line.startswith(prefixes)]
    if len(lines) > MAX_SAMPLES:
        raise ProtocolError(f"it has {len(lines)} samples: up to {MAX_SAMPLES} are read")
    # Imported here: it loads an HTTP server and takes 25 ms, which every start of the window would wait for.
    from prometheus_client.parser import text_string_to_metric_families

    samples: Samples = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError, RecursionError) as error:
        raise ProtocolError(f"it cannot be read as metrics ({' '.join(str(error).split())[:100]})") from None
    return samples


def _of_rank(samples: Samples, rank: tuple[str, int], replicas: tuple[str, ...], model: str) -> Samples:
    kept: Samples = {}
    for name, all_of in samples.items():
        of_rank = [(labels, value) for labels, value in all_of if _is_of(labels, rank, model)]
        firsts = {
            label: min((labels[label] for labels, _ in of_rank if label in labels), default="") for label in replicas
        }
        first = [
            (labels, value)
            for labels, value in of_rank
            if all(labels.get(label, first) == first for label, first in firsts.items())
        ]
        if first:
            kept[name] = first
    return kept


def _is_of(labels: Labels, rank: tuple[str, int], model: str) -> bool:
    if model and labels.get("model_name", model) != model:
        return False
    label, number = rank
    return labels.get(label, "") in ("", str(number))
