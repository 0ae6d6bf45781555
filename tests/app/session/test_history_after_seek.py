"""Tests that the history shown after a seek ends with the state at the cursor."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kvscope_app.session.history import BIN_NS
from kvscope_app.session.session import Session
from kvscope_app.views.requests.request_rows import read_columns
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 60_000


@pytest.fixture
def session(qtbot):
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        made = Session(PlaybackSource(Recording.open(Path(path)), is_playing=False))
        made.start()
        qtbot.waitUntil(lambda: made.mirror.hello is not None and made.is_overview_complete, timeout=WAIT_MS)
        yield made
        made.close()


@pytest.mark.parametrize("at_s", [12.4, 21.7, 33.3, 40.9])
def test_curves_end_with_the_values_of_the_state_at_the_cursor(session, qtbot, at_s):
    first_ns, _ = session.timeline.range_ns
    target_ns = first_ns + round(at_s * 1e9)

    def is_there():
        session.poll()
        history = session.history
        return history.began_ns is not None and abs(history.wall_ns(history.began_ns) - target_ns) < 1_000_000_000

    session.timeline.go_to(target_ns)
    qtbot.waitUntil(is_there, timeout=WAIT_MS)
    history, mirror = session.history, session.mirror
    before = history.began_ns // BIN_NS - 1
    found = history.ring.read(before, before, ("blocks_active", "blocks_cached", "num_running", "num_waiting"))
    expected = (mirror.num_active, mirror.num_cached, mirror.counters.num_running, mirror.counters.num_waiting)
    assert tuple(int(column[0]) for column in found.values()) == expected


def first_tokens() -> dict[int, tuple[int, int]]:
    """Return (arrival, first token) in ns for each request of the sample, computed from its frames."""
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        frames = list(Recording.open(Path(path)).frames())
    arrivals, firsts = {}, {}
    for frame in frames:
        arrivals |= {info.number: info.arrival_ns for info in frame.new_requests}
        columns = (np.frombuffer(part, "<u4") for part in (frame.requests.number, frame.requests.num_output_tokens))
        for number, output in zip(*(column.tolist() for column in columns), strict=True):
            if output:
                firsts.setdefault(number, frame.time_ns)
    return {number: (arrivals[number], first_ns) for number, first_ns in firsts.items()}


@pytest.mark.parametrize("at_s", [12.4, 33.3])
def test_request_columns_after_a_seek_equal_those_of_a_live_session(session, qtbot, at_s):
    """Time to first token and speed are known for requests that have a token by then, and NaN for others."""
    first_ns, _ = session.timeline.range_ns
    session.timeline.go_to(first_ns + round(at_s * 1e9))
    qtbot.waitUntil(lambda: session.poll() or session.history.began_ns is not None, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: session.mirror.requests.num_output_tokens.any(), timeout=WAIT_MS)
    columns, tokens = read_columns(session.mirror, session.history.request_times), first_tokens()
    has_token = columns.num_output_tokens > 0
    expected = [(tokens[number][1] - tokens[number][0]) / 1e9 for number in columns.number[has_token].tolist()]
    assert len(expected) > 1
    assert columns.ttft_s[has_token].tolist() == pytest.approx(expected)
    assert np.isnan(columns.ttft_s[~has_token]).all()
    runs = has_token & (columns.state == RequestState.RUNNING) & (columns.num_output_tokens > 1)
    assert np.isfinite(columns.tokens_per_s[runs]).all()
