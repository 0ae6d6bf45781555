"""The roofline as a person uses it, on a recording whose steps tell their work: read, pointed at, chosen."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QPointF, QSettings, Qt
from tests.app import window_driver as driver

from kvscope_app.session.session import Session
from kvscope_app.setting_names import ROOFLINE_RANGE
from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.inspector.inspector_view import STEP, InspectorView
from kvscope_app.views.roofline.point_text import point_text
from kvscope_app.views.roofline.roofline_view import NOT_RECORDED, RANGES_S, RooflineView
from kvscope_telemetry.messages.telemetry import DeviceInfo, Frame, Snapshot, Work
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAIT_MS = 60_000
LIMITS = DeviceInfo(kind="cpu", read_bytes_per_s=20_000_000_000, flops_per_s=400_000_000_000)


def with_work(message):
    """A message of the sample, as today's engine tells it."""
    if isinstance(message, Snapshot):
        return msgspec.structs.replace(message, hello=msgspec.structs.replace(message.hello, device=LIMITS))
    if isinstance(message, Frame) and message.batch.number:
        tokens = message.batch.num_prefill_tokens + message.batch.num_decode_tokens
        work = Work(flops=tokens * 270_000_000, attention_flops=10_000, weights_bytes=270_000_000, kv_read_bytes=tokens)
        return msgspec.structs.replace(message, work=work)
    return message


def without_work(message):
    """The same as older engines told it."""
    return msgspec.structs.replace(message, work=Work()) if isinstance(message, Frame) else message


@pytest.fixture(scope="module")
def recording_with_work(tmp_path_factory):
    """The sample's first seconds with the work of each step."""
    return write(tmp_path_factory.mktemp("roofline") / "told.mcap", with_work)


@pytest.fixture(scope="module")
def untold(tmp_path_factory):
    """The same without, as older engines recorded it."""
    return write(tmp_path_factory.mktemp("roofline") / "untold.mcap", without_work)


def write(path, change):
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as sample:
        recording = Recording.open(Path(sample))
        with RecordingWriter(path) as writer:
            for at_s, message in recording.messages(0.0, 6.0):
                at_ns = recording.start_ns + round(at_s * 1e9)
                assert writer.write(change(message), wait=True, log_time_ns=at_ns)
    return path


@pytest.fixture
def show(qtbot):
    made = []

    def make(path):
        session = Session(PlaybackSource(Recording.open(path), is_playing=False))
        session.start()
        made.append(session)
        qtbot.waitUntil(lambda: session.mirror.hello is not None and session.is_overview_complete, timeout=WAIT_MS)
        session.timeline.go_to(session.timeline.range_ns[1])
        qtbot.waitUntil(lambda: session.mirror.step > 0, timeout=WAIT_MS)
        view = RooflineView(session)
        made.append(view)
        qtbot.addWidget(view)
        view.resize(420, 360)
        view.apply_theme(DARK)
        view.show()
        view.refresh()
        qtbot.waitUntil(lambda: len(view.feed.steps) > 0 and not view.feed.is_reading, timeout=WAIT_MS)
        view.refresh()
        return view

    yield make
    for each in reversed(made):
        each.shut_down() if isinstance(each, RooflineView) else each.close()


def pixel(view, place):
    across, up = view.canvas.scales()
    points = view.points
    return QPointF(across.at(float(points.intensity[place])), up.at(float(points.flops_per_s[place])))


def test_a_step_that_is_clicked_is_shown_everywhere(show, recording_with_work, qtbot):
    view = show(recording_with_work)
    session, points = view.session, view.points
    assert len(points) > 3
    inspector = InspectorView(session)
    qtbot.addWidget(inspector)
    inspector.show()
    place = len(points) // 2
    view.canvas.point_at = lambda at: place  # others may lie where it does
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=pixel(view, place).toPoint())
    step, numbers = int(points.steps.step[points.place[place]]), points.steps.batch(int(points.place[place])).numbers
    qtbot.waitUntil(lambda: session.mirror.step == step, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: session.selection.batch == tuple(numbers.tolist()), timeout=WAIT_MS)
    assert inspector.subject == STEP

    def is_available():
        view.refresh()
        return view.words.text().startswith("Step ")

    qtbot.waitUntil(is_available, timeout=WAIT_MS)  # steps around it may be read once more
    assert view.canvas.selected == view.points.of_step(session.mirror.epoch, step) is not None
    assert "of memory bandwidth" in view.words.text()

    def facts():
        inspector.refresh()
        return driver.facts(inspector.table)

    qtbot.waitUntil(lambda: "Intensity" in facts(), timeout=WAIT_MS)
    assert facts()["Execution"] == "eager"
    assert inspector.strip.isVisible()
    inspector.shut_down()


def test_keys_go_from_step_to_step(show, recording_with_work, qtbot):
    view = show(recording_with_work)
    chosen = []
    view.canvas.chosen.disconnect()
    view.canvas.chosen.connect(chosen.append)
    view.canvas.selected = 2
    for key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
        qtbot.keyClick(view.canvas, key)
    assert chosen == [1, 3]


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_points_and_roofs_are_drawn_in_the_colours_of_the_theme(show, recording_with_work, theme):
    view = show(recording_with_work)
    view.apply_theme(theme)
    view.draw_all()
    image = view.canvas.grab().toImage()
    seen = {image.pixelColor(x, y).name() for x in range(image.width()) for y in range(0, image.height(), 2)}
    assert theme.base in seen
    assert theme.muted in seen  # the roofs
    across, up = view.canvas.scales()
    ridge = LIMITS.flops_per_s / LIMITS.read_bytes_per_s
    assert across.low < ridge < across.high
    assert up.high > LIMITS.flops_per_s


def test_a_recording_without_the_work_of_steps_is_said_to_be_one(show, untold):
    view = show(untold)
    assert len(view.points) == 0
    assert view.empty_label.isVisible()
    assert NOT_RECORDED in driver.lines(view)
    assert view.words.text() == ""


def test_its_time_is_remembered(show, recording_with_work, qtbot, tmp_path):
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    view = show(recording_with_work)
    view.ranges.chosen.emit(1)
    view.save_settings(settings)
    other = RooflineView(view.session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    name = list(RANGES_S)[1]
    assert driver.button(other.ranges, name).isChecked()
    settings.clear()
    other.save_settings(settings)
    assert settings.value(ROOFLINE_RANGE) == name
    other.shut_down()


def test_pointing_tells_of_a_point_and_of_nothing_elsewhere(show, recording_with_work, qtbot):
    view = show(recording_with_work)
    canvas = view.canvas
    assert canvas.point_at(pixel(view, len(view.points) - 1)) >= 0
    assert canvas.point_at(QPointF(-500, -500)) == -1
    place = next(place for place in range(len(view.points)) if canvas.point_at(pixel(view, place)) != canvas.selected)
    text = point_text(view.points, canvas.point_at(pixel(view, place)), view.device)
    assert not view.words.text().startswith(text)

    def is_told():
        """Points that are read meanwhile are shown instead of the one that is pointed at."""
        for at in (QPointF(1, 1), pixel(view, place)):
            qtbot.mouseMove(canvas, at.toPoint())
        return view.words.text().startswith(text)

    qtbot.waitUntil(is_told, timeout=WAIT_MS)
