"""The times of requests that are under way, and what is told of each at its end.

Owns when each came, began and got its first token, on the engine's clock. A part of a life that nobody saw (of a
request that was there before us, or through a hole) is not counted anywhere, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvscope_engine.metrics.histogram import FIRST_TOKEN_S, REQUEST_S, STEP_TOKENS, TOKEN_S, Histogram, lengths
from kvscope_telemetry.messages.telemetry import Event, Frame, RequestInfo, Snapshot


class Histograms:
    """All of an engine's start, named as vLLM names them. `max_model_len` bounds lengths."""

    def __init__(self, max_model_len: int) -> None:
        of_lengths = lengths(max_model_len)
        self.time_to_first_token_seconds = Histogram(FIRST_TOKEN_S)
        self.inter_token_latency_seconds = Histogram(TOKEN_S)
        self.request_time_per_output_token_seconds = Histogram(TOKEN_S)
        self.e2e_request_latency_seconds = Histogram(REQUEST_S)
        self.request_queue_time_seconds = Histogram(REQUEST_S)
        self.request_inference_time_seconds = Histogram(REQUEST_S)
        self.request_prefill_time_seconds = Histogram(REQUEST_S)
        self.request_decode_time_seconds = Histogram(REQUEST_S)
        self.iteration_tokens_total = Histogram(STEP_TOKENS)
        self.request_prompt_tokens = Histogram(of_lengths)
        self.request_generation_tokens = Histogram(of_lengths)
        self.request_params_max_tokens = Histogram(of_lengths)


@dataclass(slots=True)
class _Life:
    """One request; times in ns of the engine's clock, None: not seen."""

    info: RequestInfo
    began_ns: int | None = None
    first_token_ns: int | None = None


@dataclass(slots=True)
class Lives:
    """Tell it every snapshot and frame of one engine start, in order."""

    histograms: Histograms
    _there: dict[int, _Life] = field(default_factory=dict)
    _without_token: set[int] = field(default_factory=set)
    """Whose first token will be seen."""

    def snapshot(self, snapshot: Snapshot) -> None:
        """Who is there; through a hole first tokens may have come unseen."""
        known = self._there
        self._there = {info.number: known.get(info.number) or _Life(info=info) for info in snapshot.requests_info}
        numbers, outputs = _columns(snapshot)
        without = {number for number, output in zip(numbers, outputs, strict=False) if not output}
        self._without_token = without & self._there.keys()

    def frame(self, frame: Frame) -> None:
        """Who came, began, got a first token and ended in a step."""
        for info in frame.new_requests:
            self._there[info.number] = _Life(info=info)
            self._without_token.add(info.number)
        for event in frame.events:
            if event.kind == "admitted" and event.number in self._there:
                self._there[event.number].began_ns = event.time_ns
        if frame.first_token_ns:
            self._first_tokens(frame)
        for event in frame.events:
            if event.kind == "finished":
                self._finish(event)
            elif event.kind == "aborted":
                self._forget(event.number)

    def _first_tokens(self, frame: Frame) -> None:
        numbers, outputs = _columns(frame)
        for number, output in zip(numbers, outputs, strict=False):
            if output and number in self._without_token:
                self._without_token.discard(number)
                self._there[number].first_token_ns = frame.time_ns

    def _forget(self, number: int) -> _Life | None:
        self._without_token.discard(number)
        return self._there.pop(number, None)

    def _finish(self, event: Event) -> None:
        """One that ended by itself: its last token came in the step of its end."""
        life = self._forget(event.number)
        if life is None:
            return
        into, info = self.histograms, life.info
        into.request_prompt_tokens.add(info.num_prompt_tokens)
        into.request_generation_tokens.add(event.num_tokens)
        if info.max_tokens:
            into.request_params_max_tokens.add(info.max_tokens)
        _add_span(into.e2e_request_latency_seconds, info.arrival_ns, event.time_ns)
        _add_span(into.request_queue_time_seconds, info.arrival_ns, life.began_ns)
        _add_span(into.request_inference_time_seconds, life.began_ns, event.time_ns)
        _add_span(into.request_prefill_time_seconds, life.began_ns, life.first_token_ns)
        _add_span(into.request_decode_time_seconds, life.first_token_ns, event.time_ns)
        if life.first_token_ns is not None and event.num_tokens > 1:
            decode_s = (event.time_ns - life.first_token_ns) / 1e9
            into.request_time_per_output_token_seconds.add(decode_s / (event.num_tokens - 1))


def _add_span(histogram: Histogram, from_ns: int | None, until_ns: int | None) -> None:
    if from_ns is not None and until_ns is not None:
        histogram.add((until_ns - from_ns) / 1e9)


def _columns(message: Frame | Snapshot) -> tuple[list[int], list[int]]:
    """Numbers of the requests it tells of, and how many tokens each has generated."""
    rows = message.requests
    return np.frombuffer(rows.number, "<u4").tolist(), np.frombuffer(rows.num_output_tokens, "<u4").tolist()
