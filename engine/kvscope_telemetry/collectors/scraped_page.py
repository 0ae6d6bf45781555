"""Parses a page of Prometheus metrics of any engine to samples of one data-parallel rank, by name and label.

Prometheus' own parser reads it. Lines of other programs on the same page are removed before that, because a page may be
large and the parser is slow.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Final, Self

from kvscope_telemetry.errors import ProtocolError

RAY_PREFIX: Final = re.compile(r"^ray_(vllm|sglang)[_:]")
"""Beginning of the metric names of an engine in Ray Serve, which cannot contain a colon in some versions of Ray."""
MAX_SAMPLES: Final = 200_000
MAX_COUNT: Final = 1 << 53
"""Maximum value of a counter. Larger values count as unknown, because their sums would overflow an i64."""
Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


class ScrapedPage:
    """Samples of a metrics page for one data-parallel rank and model.

    Args:
        samples: All samples of the page by name.
        rank: Label and number of the rank; None selects the lowest rank on the page. Samples without the label apply to
            all ranks.
        replicas: Labels of processes that repeat the same values. Only the samples of the first process are used.
        model: Name of the model; empty for all models.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        rank: tuple[str, int | None] = ("", 0),
        replicas: tuple[str, ...] = (),
        model: str = "",
    ) -> None:
        self.ranks = _ranks_in(samples, rank[0])
        """Numbers of the ranks on the page, ascending; empty if no sample has the rank's label."""
        label, number = rank
        if number is None:
            number = self.ranks[0] if self.ranks else 0
        self._samples = _select_rank(samples, (label, number), replicas, model)

    @classmethod
    def parse(
        cls,
        text: str,
        prefixes: tuple[str, ...],
        *,
        rank: tuple[str, int | None] = ("", 0),
        replicas: tuple[str, ...] = (),
        model: str = "",
    ) -> Self:
        """Parse a page in Prometheus' text format. Only metrics whose names begin with one of `prefixes` are read.

        Raises ProtocolError if `text` is not a page of metrics.
        """
        return cls(_parse_samples(text, prefixes), rank=rank, replicas=replicas, model=model)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._samples)

    def total(self, *names: str, where: Labels | None = None) -> int | None:
        """Return the value of a counter, summed over all label values. The first of `names` that is on the page is
        used.

        Returns None if none of the names is on the page, or if the value is not from 0 to `MAX_COUNT`.
        """
        value = self.sum_of(*names, where=where)
        return None if value is None or not 0 <= value <= MAX_COUNT else int(value)

    def sum_of(self, *names: str, where: Labels | None = None) -> float | None:
        """Return the sum of a metric over all label values, using the first of `names` that is on the page;
        None if none is.
        """
        for name in names:
            values = [value for labels, value in self._samples.get(name, ()) if _matches(labels, where)]
            if values:
                return sum(values)
        return None

    def by_label(self, name: str, label: str) -> list[tuple[str, float]]:
        """Return each value of `label` with the sum of the metric's samples that have it, in the page's order."""
        sums: dict[str, float] = {}
        for labels, value in self._samples.get(name, ()):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return list(sums.items())

    def gauge(self, *names: str) -> float | None:
        """Return the value of a gauge, using the first of `names` that is on the page; None if none is.

        If the gauge is also exported by priority, the sample for all priorities is preferred.
        """
        for name in names:
            samples = self._samples.get(name, ())
            values = [value for labels, value in samples if not labels.get("priority")] or [v for _, v in samples]
            if values:
                return values[0]
        return None

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, summed over all other labels; empty if it is
        malformed.
        """
        counts: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            try:
                counts[float(labels["le"])] += value
            except (KeyError, ValueError):
                return {}
        return dict(counts)

    def labels_of(self, name: str) -> Labels:
        """Return the labels of the first sample of a metric; empty if there is none."""
        samples = self._samples.get(name)
        return samples[0][0] if samples else {}

    def label(self, label: str, *names: str) -> str:
        """Return the value of `label` in the first of the metrics `names` that has it; empty if none has."""
        return next((value for name in names if (value := self.labels_of(name).get(label, ""))), "")


def _ranks_in(samples: Samples, label: str) -> tuple[int, ...]:
    values = {labels.get(label, "") for each in samples.values() for labels, _ in each} if label else set()
    return tuple(sorted(int(value) for value in values if value.isascii() and value.isdigit() and len(value) <= 6))


def _matches(labels: Labels, where: Labels | None) -> bool:
    return where is None or all(labels.get(name) == value for name, value in where.items())


def _parse_samples(text: str, prefixes: tuple[str, ...]) -> Samples:
    if text.lstrip()[:1] in ("<", "{"):
        raise ProtocolError("it is a web page, not metrics")
    # Not splitlines: a label may contain U+2028, which is a line break for Python and not for Prometheus.
    plain = (RAY_PREFIX.sub(r"\1:", line) for line in text.split("\n"))
    lines = [line for line in plain if line.startswith(prefixes)]
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


def _select_rank(samples: Samples, rank: tuple[str, int], replicas: tuple[str, ...], model: str) -> Samples:
    selected: Samples = {}
    for name, all_samples in samples.items():
        rank_samples = [(labels, value) for labels, value in all_samples if _is_selected(labels, rank, model)]
        firsts = {
            label: min((labels[label] for labels, _ in rank_samples if label in labels), default="")
            for label in replicas
        }
        first = [
            (labels, value)
            for labels, value in rank_samples
            if all(labels.get(label, first) == first for label, first in firsts.items())
        ]
        if first:
            selected[name] = first
    return selected


def _is_selected(labels: Labels, rank: tuple[str, int], model: str) -> bool:
    if model and labels.get("model_name", model) != model:
        return False
    label, number = rank
    return labels.get(label, "") in ("", str(number))
