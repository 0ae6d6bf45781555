"""Tests of steps on the timeline of a recording: reading, drawing and selecting."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from tests.app import window_driver as driver

from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import DARK
from kvscope_app.views.inspector.inspector_view import STEP, InspectorView
from kvscope_app.views.timeline.lane_layout import STEPS, gutter
from kvscope_app.views.timeline.step_lane import can_show_steps, steps_are_wide
from kvscope_app.views.timeline.steps import read_steps
from kvscope_app.views.timeline.timeline_view import TimelineView
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import SessionOverview

WAIT_MS = 60_000
SECOND_NS = 1_000_000_000


@pytest.fixture
def recording():
    """The bundled sample, recorded from the real engine under memory pressure."""
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as path:
        yield Recording.open(Path(path))


@pytest.fixture
def session(recording, qtbot):
    session = Session(PlaybackSource(recording, is_playing=False))
    session.start()
    qtbot.waitUntil(lambda: session.mirror.hello is not None and session.is_overview_complete, timeout=WAIT_MS)
    yield session
    session.close()


@pytest.fixture
def view(session, qtbot):
    view = TimelineView(session)
    qtbot.addWidget(view)
    view.resize(1_300, 560)
    view.apply_theme(DARK)
    view.show()
    view.refresh()
    yield view
    view.shut_down()


def batches_by_step(recording):
    """Return, for each step, (time, request numbers, token counts, batch), read directly from the frames."""
    found = {}
    for at_s, message in recording.messages():
        if isinstance(message, Frame) and message.batch.number:
            numbers = np.frombuffer(message.batch.number, "<u4").tolist()
            tokens = np.frombuffer(message.batch.num_tokens, "<u4").tolist()
            found[message.step] = (recording.start_ns + round(at_s * 1e9), numbers, tokens, message.batch)
    return found


def zoom_to_steps(view, recording, qtbot, at_s=12.0, length_s=2.0):
    begin_ns = recording.start_ns + round(at_s * 1e9)
    view.canvas.show_span(TimeSpan(begin_ns, begin_ns + round(length_s * 1e9)))
    span = view.canvas.shown.span
    qtbot.waitUntil(lambda: view.steps.steps.covers(span.begin_ns, span.end_ns), timeout=WAIT_MS)
    qtbot.waitUntil(lambda: view.canvas.shown.steps is view.steps.steps, timeout=WAIT_MS)
    return view.canvas.shown.steps


def step_point(view, steps, index):
    layout = view.canvas.lane_layout
    middle = (int(steps.begin_ns[index]) + int(steps.end_ns[index])) // 2
    top, height = next((top, height) for lane, top, height in layout.boxes() if lane.name == STEPS)
    return QPoint(gutter() + round(view.canvas.shown.span.share_at(middle) * layout.chart_width), top + height - 3)


def test_timeline_steps_read_from_a_recording_equal_those_of_its_frames(recording):
    plain = batches_by_step(recording)
    steps = read_steps(recording, recording.start_ns, recording.end_ns, lambda share: True)
    assert steps.step.tolist() == list(plain)
    assert steps.end_ns.tolist() == [reported_ns for reported_ns, *_ in plain.values()]
    assert (steps.begin_ns[1:] >= steps.end_ns[:-1]).all()
    for place, (_, numbers, tokens, batch) in enumerate(plain.values()):
        found = steps.batch(place)
        assert (found.numbers.tolist(), found.tokens.tolist()) == (numbers, tokens)
        assert (steps.prefill[place], steps.decode[place]) == (batch.num_prefill_tokens, batch.num_decode_tokens)


def test_recorded_steps_beyond_the_maximum_are_not_read_and_reported_as_not_covered(recording, monkeypatch):
    monkeypatch.setattr("kvscope_app.views.timeline.steps.MAX_STEPS", 10)
    steps = read_steps(recording, recording.start_ns, recording.end_ns, lambda share: True)
    assert len(steps) == 10
    assert steps.last_ns == steps.end_ns[-1]
    assert not steps.covers(recording.start_ns, recording.end_ns)


def test_reading_steps_can_be_cancelled(recording):
    with pytest.raises(OpeningCancelled):
        read_steps(recording, recording.start_ns, recording.end_ns, lambda share: False)


def test_steps_are_read_only_when_zoomed_in(view, session, recording, qtbot):
    overview, width = session.overview, view.canvas.lane_layout.chart_width
    begin_ns = recording.start_ns
    assert can_show_steps(overview, TimeSpan(begin_ns, begin_ns + 2 * SECOND_NS), width)
    assert not can_show_steps(overview, TimeSpan(begin_ns, recording.end_ns), 60)
    zoom_to_steps(view, recording, qtbot)
    view.canvas.resize(gutter() + 40, 560)
    view.canvas.fit()
    assert view.canvas.shown.steps is None


def test_unreadable_steps_are_reported(request, recording, qtbot, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kvscope_app.views.timeline.step_feed.read_steps", broken)
    view = request.getfixturevalue("view")  # created here, because it may read all steps immediately
    view.canvas.show_span(TimeSpan(recording.start_ns, recording.start_ns + 2 * SECOND_NS))
    qtbot.waitUntil(lambda: view.steps.failure == "Input/output error", timeout=WAIT_MS)
    qtbot.waitUntil(lambda: view.pointed.text() == "Steps cannot be read: Input/output error", timeout=WAIT_MS)


def test_click_on_a_step_selects_its_batch_in_all_views(view, session, recording, qtbot):
    inspector = InspectorView(session)
    qtbot.addWidget(inspector)
    inspector.resize(420, 700)
    inspector.apply_theme(DARK)
    inspector.show()
    steps = zoom_to_steps(view, recording, qtbot)
    seen = steps.within(view.canvas.shown.span.begin_ns, view.canvas.shown.span.end_ns)
    place = max(range(seen.start + 1, seen.stop - 1), key=lambda at: int(steps.end_ns[at] - steps.begin_ns[at]))
    point = step_point(view, steps, place)
    found = view.canvas.hit_test(point)
    numbers = steps.batch(place).numbers.tolist()
    assert found.text.startswith(f"Step {count(int(steps.step[place]))}: ")
    assert f"{len(numbers)} request" in found.text
    assert list(found.batch) == numbers
    qtbot.mouseMove(view.canvas, point)
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=point)
    qtbot.waitUntil(lambda: session.mirror.step == int(steps.step[place]), timeout=WAIT_MS)
    qtbot.waitUntil(lambda: session.selection.batch == tuple(numbers), timeout=WAIT_MS)
    assert inspector.subject == STEP
    view.refresh()
    assert view.canvas.batch == tuple(numbers)

    def shown_rows():
        inspector.refresh()
        return driver.table_facts(inspector.table).keys()

    qtbot.waitUntil(lambda: {f"Request #{number}" for number in numbers} <= shown_rows(), timeout=WAIT_MS)
    session.selection.select_request(numbers[0])
    assert session.selection.batch == ()


def test_arrow_keys_seek_from_step_to_step(view, session, recording, qtbot):
    steps = zoom_to_steps(view, recording, qtbot)
    first = steps.within(view.canvas.shown.span.begin_ns, view.canvas.shown.span.end_ns).start + 2
    view.canvas.show_cursor(int(steps.end_ns[first]) + 1_000)
    chosen = []
    view.canvas.chosen.disconnect()
    view.canvas.chosen.connect(chosen.append)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Right)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Left)
    assert [tuple(steps.batch(first + by).numbers.tolist()) for by in (1, -1)] == [each.batch for each in chosen]
    assert [each.time_ns - 1_000 for each in chosen] == [int(steps.end_ns[first + by]) for by in (1, -1)]


def test_steps_are_drawn_in_the_color_of_their_kind(view, recording, qtbot):
    steps = zoom_to_steps(view, recording, qtbot)
    seen = steps.within(view.canvas.shown.span.begin_ns, view.canvas.shown.span.end_ns)
    image = view.canvas.grab().toImage()
    kinds = set()
    for place in range(seen.start + 1, seen.stop - 1):
        color, parts = (
            image.pixelColor(step_point(view, steps, place)).name(),
            (steps.prefill[place], steps.decode[place]),
        )
        if not all(parts):
            kinds.add(color)
            assert color == (DARK.good if parts[1] else DARK.block_active)
    assert DARK.good in kinds


def test_steps_known_before_their_lane_exists_are_not_drawn(view, recording, qtbot):
    """After idle time, the first steps are read before their second is complete."""
    steps, canvas = zoom_to_steps(view, recording, qtbot), view.canvas
    assert len(steps)
    view.resize(1_300, 260)  # a low timeline has no lane for things that never happened
    assert any(lane.name == STEPS for lane, *_ in canvas.lane_layout.boxes())
    canvas.show_overview(SessionOverview(), canvas.shown.lanes, canvas.whole, canvas.cursor_ns)
    canvas.show_steps(steps)
    assert steps_are_wide(steps, canvas.shown.span, canvas.lane_layout.chart_width)
    assert all(lane.name != STEPS for lane, *_ in canvas.lane_layout.boxes())
    assert not canvas.grab().isNull()
