"""Totals of one epoch of an engine, their known breakdown by cause, and histograms.

Totals are those of the engine, so they include lost frames; causes and histograms cover received frames only. A restart
of the engine starts a new tally. Must not depend on metric names or sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.telemetry import (
    Counters,
    DeviceSample,
    Event,
    Frame,
    MemoryBreakdown,
    RequestInfo,
    Snapshot,
)
from kvscope_telemetry.metrics.histogram import (
    FIRST_TOKEN_S,
    REQUEST_S,
    STEP_TOKENS,
    TOKEN_S,
    PrometheusHistogram,
    length_bounds,
)
from kvscope_telemetry.running_time import RunningTime
from kvscope_telemetry.summaries.moments import FirstTokens

UNKNOWN: Final = "unknown"
FINISH_REASONS: Final = ("stop", "length", "abort", "error")
PREEMPTION_CAUSES: Final = ("swap", "recompute")


class ByCause:
    """Numbers of events by cause. Events whose cause was not received count as `UNKNOWN`. No count ever decreases."""

    def __init__(self, causes: Iterable[str]) -> None:
        self.counts = dict.fromkeys((*causes, UNKNOWN), 0)

    def add(self, causes: Iterable[str], total: int) -> None:
        """Count the received causes. The difference to the engine's `total` counts as `UNKNOWN`."""
        for cause in causes:
            self.counts[cause if cause in self.counts else UNKNOWN] += 1
        self.counts[UNKNOWN] += max(0, total - sum(self.counts.values()))


class Tally:
    """Totals of the epoch of `snapshot`, observed since `seen_s` (Unix time in seconds)."""

    def __init__(self, snapshot: Snapshot, seen_s: float) -> None:
        self.hello = snapshot.hello
        self.seen_s = seen_s
        self.counters = Counters()
        self.num_steps = 0
        self.step_ns = dict.fromkeys(("schedule", "run", "commit", "record"), 0)
        self.ends = ByCause(FINISH_REASONS)
        self.preemptions = ByCause(PREEMPTION_CAUSES)
        self.histograms = Histograms(snapshot.hello.model.max_model_len)
        self.memory: MemoryBreakdown | None = None
        self.sample: DeviceSample | None = None
        self._histories = UnfinishedRequests(self.histograms)
        self.snapshot(snapshot)

    @property
    def began_s(self) -> float:
        """Start of the engine and of its totals, Unix time in seconds."""
        return self.hello.wall_time_ns / 1e9

    def snapshot(self, snapshot: Snapshot) -> None:
        """Process the first snapshot of the epoch, or one after lost frames."""
        self._count(snapshot.counters, (), snapshot.step)
        self._histories.snapshot(snapshot)

    def frame(self, frame: Frame) -> None:
        self._count(frame.counters, frame.events, frame.step)
        for part in self.step_ns:
            self.step_ns[part] += getattr(frame.timings, f"{part}_ns")
        into = self.histograms
        into.time_to_first_token_seconds.add_all(_seconds(frame.first_token_ns))
        into.inter_token_latency_seconds.add_all(_seconds(frame.inter_token_ns))
        num_tokens = frame.batch.num_prefill_tokens + frame.batch.num_decode_tokens
        if num_tokens:
            into.iteration_tokens_total.add(num_tokens)
        self._histories.frame(frame)

    def _count(self, counters: Counters, events: Iterable[Event], step: int) -> None:
        self.counters, self.num_steps = counters, max(self.num_steps, step)
        ends = [_finish_reason(event) for event in events if event.kind in ("finished", "aborted")]
        self.ends.add(ends, counters.finished + counters.aborted)
        preempted = [_preemption_mode(event) for event in events if event.kind == "preempted"]
        self.preemptions.add(preempted, counters.preemptions)


def _finish_reason(event: Event) -> str:
    if event.kind == "aborted":
        return "abort"
    return event.data.finish_reason if event.data is not None else UNKNOWN


def _preemption_mode(event: Event) -> str:
    if event.data is None:
        return UNKNOWN
    return "swap" if event.data.is_swapped else "recompute"


def _seconds(packed_ns: bytes) -> npt.NDArray[np.float64]:
    seconds: npt.NDArray[np.float64] = np.frombuffer(packed_ns, "<u8") / 1e9
    return seconds


# Times of unfinished requests, which are added to histograms when a request ends.
#
# `UnfinishedRequests` owns the times of arrival, start and first token, on the engine's clock. A time that was not
# observed (because the request was older than the connection, or because of a gap) is left out of the histograms, never
# estimated.
class Histograms:
    """All histograms of an epoch, with vLLM's names. `max_model_len` determines the bounds of token counts."""

    def __init__(self, max_model_len: int) -> None:
        of_lengths = length_bounds(max_model_len)
        self.time_to_first_token_seconds = PrometheusHistogram(FIRST_TOKEN_S)
        self.inter_token_latency_seconds = PrometheusHistogram(TOKEN_S)
        self.request_time_per_output_token_seconds = PrometheusHistogram(TOKEN_S)
        self.e2e_request_latency_seconds = PrometheusHistogram(REQUEST_S)
        self.request_queue_time_seconds = PrometheusHistogram(REQUEST_S)
        self.request_inference_time_seconds = PrometheusHistogram(REQUEST_S)
        self.request_prefill_time_seconds = PrometheusHistogram(REQUEST_S)
        self.request_decode_time_seconds = PrometheusHistogram(REQUEST_S)
        self.iteration_tokens_total = PrometheusHistogram(STEP_TOKENS)
        self.request_prompt_tokens = PrometheusHistogram(of_lengths)
        self.request_generation_tokens = PrometheusHistogram(of_lengths)
        self.request_params_max_tokens = PrometheusHistogram(of_lengths)


@dataclass(slots=True)
class _RequestHistory:
    info: RequestInfo
    moments: Moments


@dataclass(slots=True)
class UnfinishedRequests:
    """Times of arrival, start and first token of unfinished requests. Must be fed every snapshot and frame of
    one epoch, in order.
    """

    histograms: Histograms
    _requests: dict[int, _RequestHistory] = field(default_factory=dict)
    _first_tokens: FirstTokens = field(default_factory=FirstTokens)
    _running: RunningTime = field(default_factory=RunningTime)

    def snapshot(self, snapshot: Snapshot) -> None:
        """Reset to the requests of `snapshot`. After a gap, first tokens may have been missed."""
        known = self._requests
        self._requests = {info.number: known.get(info.number) or self._history(info) for info in snapshot.requests_info}
        self._running.catch_up(snapshot.stops, snapshot.time_ns)
        self._first_tokens.snapshot(snapshot)

    def frame(self, frame: Frame) -> None:
        """Process the requests that arrived, started, received a first token or ended in a step."""
        for info in frame.new_requests:
            self._requests[info.number] = self._history(info)
        for event in frame.events:
            self._running.record(event)
            if event.kind == "admitted" and event.number in self._requests:
                self._requests[event.number].moments.started_ns = event.time_ns
        for number in self._first_tokens.frame(frame):
            if number in self._requests:
                self._requests[number].moments.first_token_ns = frame.time_ns
        for event in frame.events:
            if event.kind == "finished":
                self._finish(event)
            elif event.kind == "aborted":
                self._requests.pop(event.number, None)

    def _history(self, info: RequestInfo) -> _RequestHistory:
        return _RequestHistory(info, Moments(info.arrival_ns, running=self._running))

    def _finish(self, event: Event) -> None:
        """Add a finished (not aborted) request to the histograms. Its last token was generated in the step in
        which it ended.
        """
        history = self._requests.pop(event.number, None)
        if history is None:
            return
        into, info, moments = self.histograms, history.info, history.moments
        moments.ended_ns = event.time_ns
        into.request_prompt_tokens.add(info.num_prompt_tokens)
        into.request_generation_tokens.add(event.num_tokens)
        if info.max_tokens:
            into.request_params_max_tokens.add(info.max_tokens)
        decode_ns = moments.decode_ns
        for histogram, took_ns in (
            (into.e2e_request_latency_seconds, moments.total_ns),
            (into.request_queue_time_seconds, moments.queue_ns),
            (into.request_inference_time_seconds, moments.inference_ns),
            (into.request_prefill_time_seconds, moments.prefill_ns),
            (into.request_decode_time_seconds, decode_ns),
        ):
            if took_ns is not None:
                histogram.add(took_ns / 1e9)
        if decode_ns is not None and event.num_tokens > 1:
            into.request_time_per_output_token_seconds.add(decode_ns / 1e9 / (event.num_tokens - 1))
