"""What one start of an engine told in all: its totals, what of them is known by cause, and the histograms.

Totals are the engine's own, so they survive frames that were lost; causes and histograms are of what was heard. A new
start is a new tally. Knows neither names on a page nor sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_engine.metrics.lives import Histograms, Lives
from kvscope_telemetry.messages.telemetry import (
    Counters,
    DeviceSample,
    Event,
    Frame,
    MemoryBreakdown,
    Snapshot,
)

UNKNOWN: Final = "unknown"
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PREEMPTION_CAUSES: Final = ("swap", "recompute")


class ByCause:
    """A total by cause. What the engine counted and nobody heard the cause of is `UNKNOWN`; no count ever falls."""

    def __init__(self, causes: Iterable[str]) -> None:
        self.counts = dict.fromkeys((*causes, UNKNOWN), 0)

    def add(self, causes: Iterable[str], total: int) -> None:
        """These were heard, and the engine counts `total` in all."""
        for cause in causes:
            self.counts[cause if cause in self.counts else UNKNOWN] += 1
        self.counts[UNKNOWN] += max(0, total - sum(self.counts.values()))


class Tally:
    """Of the engine start that `snapshot` is of, heard from `seen_s` on (Unix time in seconds)."""

    def __init__(self, snapshot: Snapshot, seen_s: float) -> None:
        self.hello = snapshot.hello
        self.seen_s = seen_s
        self.counters = Counters()
        self.num_steps = 0
        self.ends = ByCause(FINISH_REASONS)
        self.preemptions = ByCause(PREEMPTION_CAUSES)
        self.histograms = Histograms(snapshot.hello.model.max_model_len)
        self.memory: MemoryBreakdown | None = None
        self.sample: DeviceSample | None = None
        self._lives = Lives(self.histograms)
        self.snapshot(snapshot)

    @property
    def began_s(self) -> float:
        """When the engine started, Unix time in seconds: its totals are from then on."""
        return self.hello.wall_time_ns / 1e9

    def snapshot(self, snapshot: Snapshot) -> None:
        """The state at the beginning, or after a hole."""
        self._count(snapshot.counters, (), snapshot.step)
        self._lives.snapshot(snapshot)

    def frame(self, frame: Frame) -> None:
        """The next step."""
        self._count(frame.counters, frame.events, frame.step)
        into = self.histograms
        into.time_to_first_token_seconds.add_all(_seconds(frame.first_token_ns))
        into.inter_token_latency_seconds.add_all(_seconds(frame.inter_token_ns))
        num_tokens = frame.batch.num_prefill_tokens + frame.batch.num_decode_tokens
        if num_tokens:
            into.iteration_tokens_total.add(num_tokens)
        self._lives.frame(frame)

    def _count(self, counters: Counters, events: Iterable[Event], step: int) -> None:
        self.counters, self.num_steps = counters, max(self.num_steps, step)
        ends = [_reason(event) for event in events if event.kind in ("finished", "aborted")]
        self.ends.add(ends, counters.finished + counters.aborted)
        preempted = [_how(event) for event in events if event.kind == "preempted"]
        self.preemptions.add(preempted, counters.preemptions)


def _reason(event: Event) -> str:
    if event.kind == "aborted":
        return "abort"
    return event.data.finish_reason if event.data is not None else UNKNOWN


def _how(event: Event) -> str:
    if event.data is None:
        return UNKNOWN
    return "swap" if event.data.is_swapped else "recompute"


def _seconds(packed_ns: bytes) -> npt.NDArray[np.float64]:
    seconds: npt.NDArray[np.float64] = np.frombuffer(packed_ns, "<u8") / 1e9
    return seconds
