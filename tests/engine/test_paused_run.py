"""A run that was paused has the latencies of the same run without the pause, and shows the pause in its events,
overview and report.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cut_run import CutRun

from kvscope_engine import Engine
from kvscope_telemetry.exports.export import ExportTarget, export
from kvscope_telemetry.exports.phase_spans import read_request_histories
from kvscope_telemetry.exports.run_summary import summarize_run
from kvscope_telemetry.exports.span import span_of, timed_messages
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

PAUSE_S = 2.0
FIGURES = (
    "first_token_p50_s",
    "first_token_p95_s",
    "inter_token_p50_s",
    "inter_token_p95_s",
    "queued_p95_s",
)


def submit(number: int) -> Submit:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    return Submit(request_id=f"r{number}", prompt_token_ids=tuple(range(1 + number, 12 + number)), sampling=sampling)


@pytest.fixture
def paused_run(make_engine: Callable[..., Engine]) -> list[TelemetryMessage]:
    """Messages of an engine that was paused between two steps while requests ran, waited and arrived."""
    messages: list[TelemetryMessage] = []
    engine = make_engine(publish=messages.append, max_num_seqs=3)
    messages.append(engine.snapshot())
    for number in range(8):
        engine.submit(submit(number))
    for _ in range(12):
        engine.step()
    engine.finish_in_flight()
    engine.pauses.pause("Ada")
    time.sleep(PAUSE_S / 2)
    engine.submit(submit(8))
    time.sleep(PAUSE_S / 2)
    engine.pauses.resume("resumed by Ada")
    while engine.has_unfinished:
        engine.step()
    return messages


def write_recording(messages: list[TelemetryMessage], path: Path) -> Recording:
    with RecordingWriter(path) as writer:
        for message in messages:
            assert writer.write(message)
    return Recording.open(path)


def values(messages: list[TelemetryMessage], name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    packed = b"".join([getattr(message, name) for message in messages if isinstance(message, Frame)])
    return np.sort(np.frombuffer(packed, "<u8").astype(np.float64))


def test_latencies_equal_those_of_the_run_without_the_pause(paused_run: list[TelemetryMessage], tmp_path: Path) -> None:
    cut = CutRun(paused_run)
    ((begin_ns, end_ns),) = cut.pauses
    assert end_ns - begin_ns >= PAUSE_S * 1e9
    for name in ("first_token_ns", "inter_token_ns"):
        np.testing.assert_allclose(values(paused_run, name), values(cut.messages, name), rtol=0.01, atol=20_000)
    pair = write_recording(paused_run, tmp_path / "paused.mcap"), write_recording(cut.messages, tmp_path / "cut.mcap")
    overviews = [read_overview(recording) for recording in pair]
    found = [
        summarize_run(recording, overview, span_of(recording))
        for recording, overview in zip(pair, overviews, strict=True)
    ]
    for name in FIGURES:
        paused, without = (getattr(each, name) for each in found)
        assert paused == pytest.approx(without, rel=0.01, abs=20e-6)
    assert found[0].figures["stopped_s"] == pytest.approx((end_ns - begin_ns) / 1e9, abs=0.01)
    assert found[1].figures["stopped_s"] == 0
    histories = [read_request_histories(timed_messages(recording, span_of(recording))) for recording in pair]
    assert len(histories[0]) == 9
    for history, same in zip(*histories, strict=True):
        for name in ("queue_ns", "ttft_ns", "decode_ns", "total_ns"):
            assert getattr(history.moments, name) == pytest.approx(getattr(same.moments, name), rel=0.01, abs=20_000)
    assert all(history.total_stopped_ns(pair[0].end_ns) for history in histories[0] if history.info.number > 3)


def test_pause_is_in_the_events_the_overview_and_the_report(paused_run: list[TelemetryMessage], tmp_path: Path) -> None:
    recording = write_recording(paused_run, tmp_path / "paused.mcap")
    (stop,) = read_overview(recording).stops
    assert stop.by == "Ada"
    assert PAUSE_S <= (stop.end_ns - stop.begin_ns) / 1e9 < PAUSE_S + 1
    for name in ("events.csv", "requests.csv", "report.html"):
        export(recording, ExportTarget.from_path(tmp_path / name))
    events, requests, report = ((tmp_path / name).read_text() for name in ("events.csv", "requests.csv", "report.html"))
    assert "engine_paused" in events
    assert "it was paused by Ada for 2" in events
    assert "stopped_ns" in requests
    assert "The engine was stopped for 2" in report
    assert re.search('<g class="stopped"[^>]*><title>paused by Ada', report)
    assert "in the queue (without 2" in report or "waited" not in report
