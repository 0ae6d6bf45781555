"""Derives kvscope's counters and latency histograms from an external engine's metrics, independent of blocks."""

from __future__ import annotations

from msgspec.structs import replace

from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.messages.telemetry import Counters, Histogram, MemoryBreakdown


class ReadingTotals:
    """Counters and latencies as of the newest metrics. A value that is missing in the metrics keeps its
    previous value.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.used_share = -1.0
        self.latencies: tuple[Histogram, ...] = ()
        """Histograms of the latency samples added since the previous reading."""
        self.has_news = False
        """Whether a counter differs from the last published frame."""
        self._num_prefill = self._num_decode = 0
        self._before: EngineReading | None = None

    def restart(self) -> None:
        self.counters, self.latencies, self._before = Counters(), (), None
        self._num_prefill = self._num_decode = 0

    def count(self, reading: EngineReading) -> None:
        before, self._before = self._before, reading
        old = self.counters
        self.counters = _counters(reading, old)
        if before is not None:  # without a previous reading, the period of these tokens is unknown
            self._num_prefill += max(0, self.counters.prompt_tokens - old.prompt_tokens)
            self._num_decode += max(0, self.counters.generation_tokens - old.generation_tokens)
        self.has_news |= self.counters != old
        self.used_share = -1.0 if reading.used_share is None else reading.used_share
        earlier = {} if before is None else before.latencies
        latencies = [histogram.since(earlier.get(kind), kind) for kind, histogram in reading.latencies.items()]
        self.latencies = tuple([each for each in latencies if each is not None])

    def skip(self) -> None:
        """Exclude the newest reading, and its difference from the next one, from the totals, because it may be
        of another engine.
        """
        self._before, self.latencies, self.used_share = None, (), -1.0

    def drain_tokens(self) -> tuple[int, int]:
        """Return the numbers of prefill and decode tokens since the last call, and clear `has_news`."""
        counts, self._num_prefill, self._num_decode = (self._num_prefill, self._num_decode), 0, 0
        self.has_news = False
        return counts


def _counters(reading: EngineReading, old: Counters) -> Counters:
    prompt, cached = reading.prompt_tokens, reading.cached_tokens or 0
    return replace(
        old,
        prompt_tokens=old.prompt_tokens if prompt is None else max(prompt - cached, old.prompt_tokens),
        cached_tokens=_newest(reading.cached_tokens, old.cached_tokens),
        generation_tokens=_newest(reading.generation_tokens, old.generation_tokens),
        preemptions=_newest(reading.preemptions, old.preemptions),
        draft_tokens=_newest(reading.draft_tokens, old.draft_tokens),
        accepted_tokens=_newest(reading.accepted_tokens, old.accepted_tokens),
        finished=_newest(_difference(reading.finished, reading.aborted), old.finished),
        aborted=_newest(reading.aborted, old.aborted),
        num_running=_newest(reading.num_running, old.num_running),
        num_waiting=_newest(reading.num_waiting, old.num_waiting),
    )


def breakdown(reading: EngineReading, epoch: int, time_ns: int) -> MemoryBreakdown | None:
    if reading.weights_bytes is None or reading.kv_bytes is None:
        return None
    graphs = -1 if reading.graphs_bytes is None else reading.graphs_bytes
    return MemoryBreakdown(
        epoch=epoch,
        time_ns=time_ns,
        weights_bytes=reading.weights_bytes,
        kv_bytes=reading.kv_bytes,
        graphs_bytes=graphs,
    )


def _newest(value: int | None, before: int) -> int:
    return before if value is None else value


def _difference(total: int | None, part: int | None) -> int | None:
    return total if total is None or part is None else max(0, total - part)
