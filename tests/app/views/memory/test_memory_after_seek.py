"""Test of the Memory view's data after a seek."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kvscope_app.session.session import Session
from kvscope_app.views.memory.memory_breakdown import memory_account
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 60_000
SECOND_NS = 1_000_000_000


@pytest.fixture
def recording():
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        yield Recording.open(Path(path))


def test_memory_of_other_processes_is_known_after_a_seek(recording, qtbot):
    overview = read_overview(recording)
    used, process = overview.column("memory_used_bytes"), overview.column("process_bytes")
    places = np.flatnonzero(np.isfinite(used) & np.isfinite(process))
    place = int(places[places.size // 2])
    session = Session(PlaybackSource(recording, is_playing=False))
    session.start()
    try:
        qtbot.waitUntil(lambda: session.mirror.hello is not None and session.is_overview_complete, timeout=WAIT_MS)
        at_ns = int(overview.time_ns[place]) + SECOND_NS + SECOND_NS // 10  # in the next second, which is not complete
        step = recording.state_at((at_ns - recording.start_ns) / 1e9).step
        session.timeline.go_to(at_ns)
        qtbot.waitUntil(lambda: session.mirror.step == step, timeout=WAIT_MS)
        qtbot.waitUntil(lambda: session.history.newest_sample is not None, timeout=WAIT_MS)
        found = session.history.newest_sample
        assert found is not None
        parts = {part.key: part.num_bytes for part in memory_account(session.mirror, None, found).parts}
        assert parts["others"] == found.memory_used_bytes - found.process_bytes > 0
        near = slice(max(place - 1, 0), place + 2)
        assert np.nanmin(used[near]) <= found.memory_used_bytes <= np.nanmax(used[near])
        devices = session.history.devices.newest
        assert devices is not None  # known even while a paused recording publishes nothing
        assert abs(devices.time_ns - session.mirror.time_ns) < 5 * SECOND_NS
    finally:
        session.close()
