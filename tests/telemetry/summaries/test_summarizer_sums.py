"""Sums over a second whose frames have the largest accepted numbers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from tests.telemetry.conftest import record, simulated_messages

from kvscope_telemetry.messages.telemetry import Counters, Frame, TelemetryMessage, Timings, Work
from kvscope_telemetry.messages.validity import MAX_I64, MAX_SPAN_NS, check
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording

__all__ = ["record"]


def test_second_of_absurdly_large_numbers_is_recorded_and_read(record: Callable[..., object]) -> None:
    def enlarged(message: TelemetryMessage) -> TelemetryMessage:
        if not isinstance(message, Frame):
            return message
        frame = msgspec.structs.replace(
            message,
            timings=Timings(MAX_SPAN_NS, MAX_SPAN_NS, MAX_SPAN_NS, MAX_SPAN_NS, MAX_SPAN_NS),
            counters=Counters(preemptions=MAX_I64 * (message.seq % 2), num_running=MAX_I64),
            work=Work(flops=MAX_I64, kv_read_bytes=MAX_I64 // 2),
            first_token_ns=np.full(9, MAX_SPAN_NS, "<u8").tobytes(),
        )
        check(frame)
        return frame

    recorded = record([enlarged(message) for message in simulated_messages(1500)])
    overview = read_overview(Recording.open(recorded.path))  # type: ignore[attr-defined]
    assert 2 * MAX_SPAN_NS < overview.column("run_ns").max() < MAX_I64
    assert overview.column("flops").max() == MAX_I64
    assert np.nanmax(overview.column("first_token_p95_s")) == MAX_SPAN_NS / 1e9
