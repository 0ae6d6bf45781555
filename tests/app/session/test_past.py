"""The past of a moment that was jumped to ends with what is shown at that moment."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from kvscope_app.session.history import BIN_NS
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 60_000


@pytest.fixture
def session(qtbot):
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        made = Session(PlaybackSource(Recording.open(Path(path)), is_playing=False))
        made.start()
        qtbot.waitUntil(lambda: made.mirror.hello is not None and made.is_course_whole, timeout=WAIT_MS)
        yield made
        made.close()


@pytest.mark.parametrize("at_s", [12.4, 21.7, 33.3, 50.9])
def test_curves_end_with_what_the_map_shows(session, qtbot, at_s):
    first_ns, _ = session.timeline_range_ns
    target_ns = first_ns + round(at_s * 1e9)

    def is_there():
        session.poll()
        history = session.history
        return history.began_ns is not None and abs(history.wall_ns(history.began_ns) - target_ns) < 1_000_000_000

    session.go_to(target_ns)
    qtbot.waitUntil(is_there, timeout=WAIT_MS)
    history, mirror = session.history, session.mirror
    before = history.began_ns // BIN_NS - 1
    found = history.ring.read(before, before, ("blocks_active", "blocks_cached", "num_running", "num_waiting"))
    told = (mirror.num_active, mirror.num_cached, mirror.counters.num_running, mirror.counters.num_waiting)
    assert tuple(int(column[0]) for column in found.values()) == told
