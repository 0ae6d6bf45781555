"""The same run without its pauses: all times are moved and all latencies calculated again.

This code does not use the running time of the engine: pauses come from the events, and latencies are plain differences
of the moved clock. So it returns what the run would have shown without a pause, from the raw frames.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.messages.telemetry import (
    Event,
    Frame,
    Heartbeat,
    RequestInfo,
    Snapshot,
    TelemetryMessage,
)

_OF_PAUSES = ("engine_paused", "engine_resumed")


class CutRun:
    """Removes the pauses from `messages`, which are in order and from one engine start."""

    def __init__(self, messages: Iterable[TelemetryMessage]) -> None:
        recorded = list(messages)
        events = [event for message in recorded if isinstance(message, Frame) for event in message.events]
        begins, ends = ([event.time_ns for event in events if event.kind == kind] for kind in _OF_PAUSES)
        self.pauses = list(zip(begins, ends, strict=True))
        self._arrivals: dict[int, int] = {}
        self._preempted: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self.first_token_ns: list[int] = []
        self.inter_token_ns: list[int] = []
        self.queued_ns: list[int] = []
        self.messages = [self._cut(message) for message in recorded if not self._is_in_pause(message)]

    def moved(self, time_ns: int) -> int:
        """Return a time without the pauses before it."""
        return time_ns - sum(max(0, min(time_ns, end) - begin) for begin, end in self.pauses)

    def _is_in_pause(self, message: TelemetryMessage) -> bool:
        return isinstance(message, Heartbeat) and any(begin <= message.time_ns <= end for begin, end in self.pauses)

    def _cut(self, message: TelemetryMessage) -> TelemetryMessage:
        if isinstance(message, Frame):
            return self._frame(message)
        if isinstance(message, Snapshot):
            infos = tuple(map(self._info, message.requests_info))
            return replace(message, time_ns=self.moved(message.time_ns), requests_info=infos, stops=())
        if hasattr(message, "time_ns"):
            return replace(message, time_ns=self.moved(message.time_ns))
        return message

    def _info(self, info: RequestInfo) -> RequestInfo:
        self._arrivals[info.number] = self.moved(info.arrival_ns)
        return replace(info, arrival_ns=self.moved(info.arrival_ns))

    def _frame(self, frame: Frame) -> Frame:
        infos = tuple(map(self._info, frame.new_requests))
        now_ns = self.moved(frame.time_ns)
        first, inter = self._latencies(frame, now_ns)
        self.first_token_ns += first
        self.inter_token_ns += inter
        events = tuple(self._event(event) for event in frame.events if event.kind not in _OF_PAUSES)
        packed = [np.array(values, "<u8").tobytes() for values in (first, inter)]
        return replace(
            frame,
            time_ns=now_ns,
            new_requests=infos,
            events=events,
            first_token_ns=packed[0],
            inter_token_ns=packed[1],
        )

    def _latencies(self, frame: Frame, now_ns: int) -> tuple[list[int], list[int]]:
        first, inter = [], []
        rows = frame.requests
        numbers, outputs = (np.frombuffer(column, "<u4").tolist() for column in (rows.number, rows.num_output_tokens))
        for number, output in zip(numbers, outputs, strict=True):
            count = output - self._outputs.get(number, 0)
            self._outputs[number] = output
            if count <= 0:
                continue
            if output == count:
                first.append(now_ns - self._arrivals[number])
                inter += [0] * (count - 1)
            else:
                inter += [(now_ns - self._last[number]) // count] * count
            self._last[number] = now_ns
        return first, inter

    def _event(self, event: Event) -> Event:
        now_ns = self.moved(event.time_ns)
        if event.kind == "preempted":
            self._preempted[event.number] = now_ns
        if event.kind in ("admitted", "resumed") and event.data is not None:
            since_ns = (self._arrivals if event.kind == "admitted" else self._preempted)[event.number]
            if event.kind == "admitted":
                self.queued_ns.append(now_ns - since_ns)
            event = replace(event, data=replace(event.data, waited_ns=now_ns - since_ns, stopped_ns=0))
        return replace(event, time_ns=now_ns)
