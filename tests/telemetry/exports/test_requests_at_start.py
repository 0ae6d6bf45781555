"""Requests that were unfinished when a recording, or a range of it, began: `kvscope info` and the report say so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.telemetry.exports.conftest import story

from kvscope_app.main import main
from kvscope_telemetry.exports.requests_at_start import RequestsAtStart, requests_at_start
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows, Snapshot
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

NUM_MISSED = 5
"""Number of frames of the story before the recording began."""


def rows(*states: tuple[int, RequestState, int, int]) -> RequestRows:
    """Return request rows from (number, state, cached tokens, output tokens)."""
    numbers, kinds, cached, outputs = zip(*states, strict=True)
    zeros, cached_tokens, output_tokens = (
        np.array(each, "<u4").tobytes() for each in ([0] * len(states), cached, outputs)
    )
    return RequestRows(
        number=np.array(numbers, "<u4").tobytes(),
        state=bytes(kinds),
        num_computed_tokens=zeros,
        num_cached_tokens=cached_tokens,
        num_output_tokens=output_tokens,
        num_preemptions=np.zeros(len(states), "<u2").tobytes(),
        table_start=zeros,
        table_count=zeros,
    )


@pytest.fixture
def late_recording(tmp_path: Path) -> Path:
    """A recording of the scripted story that began when request 1 was preempted, request 2 ran and request 3 waited."""
    hello, snapshot, *frames = story()
    first = frames[NUM_MISSED]
    assert isinstance(snapshot, Snapshot)
    assert isinstance(first, Frame)
    state = msgspec.structs.replace(
        snapshot,
        seq=NUM_MISSED,
        step=NUM_MISSED,
        time_ns=first.time_ns - 1,
        requests_info=tuple(
            RequestInfo(number=number, request_id=f"r{number}", arrival_ns=snapshot.time_ns, num_prompt_tokens=20)
            for number in (1, 2, 3)
        ),
        requests=rows(
            (1, RequestState.PREEMPTED, 4, 2), (2, RequestState.RUNNING, 12, 1), (3, RequestState.WAITING, 0, 0)
        ),
    )
    with RecordingWriter(tmp_path / "late.mcap") as writer:
        for message in (hello, state, *frames[NUM_MISSED:]):
            writer.write(message, wait=True)
    return writer.path


def test_info_counts_requests_that_were_unfinished_when_the_recording_began(
    late_recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(late_recording)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^requests +1 running, 1 preempted, 1 waiting at the start, 0 admitted, ", printed, re.MULTILINE)
    assert (
        "earlier, and so not counted: admission, queue time, cached and prefilled tokens, 2 first tokens\n" in printed
    )
    assert "no new prompt; of the prompts running at the start, 16 of 40 tokens were in the cache" in printed
    assert re.search(r"^first token +none in the recording$", printed, re.MULTILINE)
    assert main(["info", "--json", str(late_recording)]) == 0
    assert json.loads(capsys.readouterr().out)["at_start"] == {
        "num_running": 1,
        "num_waiting": 2,
        "num_preempted": 1,
        "num_with_first_token": 2,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
    }


def test_report_notes_requests_that_were_unfinished_when_the_recording_began(
    late_recording: Path, tmp_path: Path
) -> None:
    assert main(["export", str(late_recording), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "At the start: 1 running, 1 preempted, 1 waiting (earlier, and so not counted: " in page


def test_nothing_is_said_about_the_start_if_no_request_was_unfinished(
    record_story: Callable[..., Recording], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record_story().path
    assert main(["info", str(path)]) == 0
    assert main(["export", str(path), "--out", str(tmp_path / "r.html")]) == 0
    assert "at the start" not in (capsys.readouterr().out + (tmp_path / "r.html").read_text("utf-8")).lower()


def test_range_of_a_recording_counts_the_requests_that_were_unfinished_at_its_start(
    record_story: Callable[..., Recording],
) -> None:
    recording = record_story()
    found = requests_at_start(recording, span_of(recording, 0.3, 1.0))
    assert found == RequestsAtStart(
        num_running=1, num_waiting=1, num_preempted=0, num_with_first_token=1, num_prompt_tokens=20, num_cached_tokens=4
    )


def test_only_numbers_of_requests_are_known_if_the_engine_reports_no_requests(tmp_path: Path) -> None:
    hello, snapshot, *_ = story()
    assert isinstance(snapshot, Snapshot)
    capabilities = msgspec.structs.replace(snapshot.hello.capabilities, requests=False)
    hello = msgspec.structs.replace(snapshot.hello, capabilities=capabilities)
    counters = msgspec.structs.replace(snapshot.counters, num_running=6, num_waiting=2)
    with RecordingWriter(tmp_path / "x.mcap") as writer:
        for message in (
            hello,
            msgspec.structs.replace(snapshot, hello=hello, counters=counters),
            Frame(epoch=hello.epoch, seq=1, step=1, time_ns=snapshot.time_ns + 1, counters=counters),
        ):
            writer.write(message, wait=True)
    recording = Recording.open(writer.path)
    assert requests_at_start(recording, span_of(recording)) == RequestsAtStart(num_running=6, num_waiting=2)
