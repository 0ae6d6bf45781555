"""Recordings of a simulated engine, and of a scripted story of three requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.simulated_engine.engine import SimulatedEngine
from tests.telemetry.conftest import SteppedClock

from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Batch,
    Counters,
    Event,
    EventData,
    Frame,
    RequestInfo,
    RequestRows,
    Snapshot,
    TelemetryMessage,
    Timings,
    Work,
)
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

MS = 1_000_000
HOSTILE = '=1+1 "<script>alert(1)</script>'


def _rows(states: dict[int, tuple[RequestState, int, int]]) -> RequestRows:
    """Return request rows from number -> (state, output tokens, preemptions)."""
    count = len(states)

    def packed(values: list[int], dtype: str) -> bytes:
        return np.array(values, dtype).tobytes()

    return RequestRows(
        number=packed(list(states), "<u4"),
        state=bytes(state for state, _, _ in states.values()),
        num_computed_tokens=packed([0] * count, "<u4"),
        num_cached_tokens=packed([4] * count, "<u4"),
        num_output_tokens=packed([output for _, output, _ in states.values()], "<u4"),
        num_preemptions=packed([times for _, _, times in states.values()], "<u2"),
        table_start=packed([0] * count, "<u4"),
        table_count=packed([0] * count, "<u4"),
    )


def story(name: str = "slow") -> list[TelemetryMessage]:
    """Return a scripted story: request 1 waits 100 ms, is swapped out for request 2 for 300 ms and finishes; request 2
    runs on; request 3 is refused.
    """
    hello = SimulatedEngine(num_blocks=100, epoch=9, clock=SteppedClock()).hello
    start, blocks = hello.time_ns, Ledger(hello.cache.num_rows).pack_all()
    snapshot = Snapshot(hello=hello, seq=0, step=0, time_ns=start, blocks=blocks)
    waiting, running = RequestState.WAITING, RequestState.RUNNING
    preempted, done = RequestState.PREEMPTED, RequestState.FINISHED

    def at(ms: int) -> int:
        return start + ms * MS

    def info(number: int, ms: int) -> RequestInfo:
        return RequestInfo(
            number=number,
            request_id=name if number == 1 else f"r{number}",
            arrival_ns=at(ms),
            num_prompt_tokens=20,
            max_tokens=8,
            adapter="sql" if number == 1 else "",
        )

    def event(kind: str, ms: int, number: int, **more: object) -> Event:
        return Event(kind=kind, time_ns=at(ms), number=number, **more)  # type: ignore[arg-type]

    began = EventData(kind="started", waited_ns=100 * MS, num_known_tokens=20)
    swapped = EventData(kind="preempted", num_needed=3, choice="newest", is_swapped=True)
    back = EventData(kind="started", waited_ns=300 * MS, num_known_tokens=22)
    ended = event("finished", 1500, 1, cause="reached its limit", num_tokens=8)
    aside = event("preempted", 400, 1, other=2, num_tokens=22, num_blocks=2, data=swapped)
    returned = event("resumed", 700, 1, num_tokens=21, data=back)
    steps: list[tuple[int, tuple[RequestInfo, ...], tuple[Event, ...], RequestRows]] = [
        (100, (info(1, 100),), (), _rows({1: (waiting, 0, 0)})),
        (210, (), (event("admitted", 200, 1, data=began),), _rows({1: (running, 0, 0)})),
        (250, (info(2, 240),), (), _rows({1: (running, 1, 0), 2: (waiting, 0, 0)})),
        (300, (), (), _rows({1: (running, 2, 0)})),
        (420, (), (aside, event("admitted", 401, 2)), _rows({1: (preempted, 2, 1), 2: (running, 1, 0)})),
        (720, (), (returned,), _rows({1: (running, 3, 1)})),
        (1500, (), (ended, event("refused", 1500, 0, cause="too long")), _rows({1: (done, 8, 1), 2: (running, 5, 0)})),
        (2600, (), (), _rows({2: (running, 6, 0)})),
    ]
    frames = [
        Frame(
            epoch=9,
            seq=place + 1,
            step=place + 1,
            time_ns=at(ms),
            batch=Batch(number=b"\1\0\0\0", num_tokens=b"\1\0\0\0", num_decode_tokens=1),
            timings=Timings(schedule_ns=MS, run_ns=8 * MS, forward_ns=7 * MS, commit_ns=MS),
            counters=Counters(
                preemptions=int(ms >= 420), num_running=1, draft_tokens=2 * (place + 1), accepted_tokens=place + 1
            ),
            work=Work(flops=14, weights_bytes=20, kv_read_bytes=1),
            new_requests=new,
            events=events,
            requests=rows,
        )
        for place, (ms, new, events, rows) in enumerate(steps)
    ]
    return [hello, snapshot, *frames]


@pytest.fixture
def record_story(tmp_path: Path) -> Callable[..., Recording]:
    """Function that records the story: `record_story(name of request 1)`."""

    def make(name: str = "slow", file: str = "story.mcap") -> Recording:
        with RecordingWriter(tmp_path / file) as writer:
            for message in story(name):
                writer.write(message, wait=True)
        return Recording.open(writer.path)

    return make
