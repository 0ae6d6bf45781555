"""Tests of the roofline view on a recording with the work of its steps."""

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
from kvscope_app.views.roofline.roofline_view import NOT_RECORDED, ROOFLINE_RANGES_S, RooflineView
from kvscope_telemetry.messages.telemetry import DeviceInfo, Frame, Snapshot, Work
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

WAIT_MS = 60_000
LIMITS = DeviceInfo(kind="cpu", read_bytes_per_s=20_000_000_000, flops_per_s=400_000_000_000)


def with_work(message):
    """Return a message of the sample with invented work and device limits."""
    if isinstance(message, Snapshot):
        return msgspec.structs.replace(message, hello=msgspec.structs.replace(message.hello, device=LIMITS))
    if isinstance(message, Frame) and message.batch.number:
        tokens = message.batch.num_prefill_tokens + message.batch.num_decode_tokens
        work = Work(flops=tokens * 270_000_000, attention_flops=10_000, weights_bytes=270_000_000, kv_read_bytes=tokens)
        return msgspec.structs.replace(message, work=work)
    return message


def without_work(message):
    """Return the message without its work, as older engines sent it."""
    return msgspec.structs.replace(message, work=Work()) if isinstance(message, Frame) else message


@pytest.fixture(scope="module")
def recording_with_work(tmp_path_factory):
    """Path of a recording of the sample's first seconds with the work of each step."""
    return write_recording(tmp_path_factory.mktemp("roofline") / "told.mcap", with_work)


@pytest.fixture(scope="module")
def recording_without_work(tmp_path_factory):
    """Path of a recording of the sample's first seconds without work, as from older engines."""
    return write_recording(tmp_path_factory.mktemp("roofline") / "untold.mcap", without_work)


def write_recording(path, change):
    with resources.as_file(resources.files("kvscope_resources") / "sample.mcap") as sample:
        recording = Recording.open(Path(sample))
        with RecordingWriter(path) as writer:
            for at_s, message in recording.messages(0.0, 6.0):
                at_ns = recording.start_ns + round(at_s * 1e9)
                assert writer.write(change(message), wait=True, log_time_ns=at_ns)
    return path


@pytest.fixture
def show_roofline(qtbot):
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


def pixel_of_point(view, index):
    across, up = view.canvas.scales()
    points = view.points
    return QPointF(across.position_of(float(points.intensity[index])), up.position_of(float(points.flops_per_s[index])))


def test_step_clicked_in_the_roofline_is_shown_in_all_views(show_roofline, recording_with_work, qtbot):
    view = show_roofline(recording_with_work)
    session, points = view.session, view.points
    assert len(points) > 3
    inspector = InspectorView(session)
    qtbot.addWidget(inspector)
    inspector.show()
    index = len(points) // 2
    view.canvas.point_at = lambda at: index  # other points may be at the same place
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=pixel_of_point(view, index).toPoint())
    step, numbers = (
        int(points.steps.step[points.step_index[index]]),
        points.steps.batch(int(points.step_index[index])).numbers,
    )
    qtbot.waitUntil(lambda: session.mirror.step == step, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: session.selection.batch == tuple(numbers.tolist()), timeout=WAIT_MS)
    assert inspector.subject == STEP

    def is_available():
        view.refresh()
        return view.text_label.text().startswith("Step ")

    qtbot.waitUntil(is_available, timeout=WAIT_MS)  # steps around it may be read again
    assert view.canvas.selected == view.points.index_of_step(session.mirror.epoch, step) is not None
    assert "of memory bandwidth" in view.text_label.text()

    def facts():
        inspector.refresh()
        return driver.table_facts(inspector.table)

    qtbot.waitUntil(lambda: "Intensity" in facts(), timeout=WAIT_MS)
    assert facts()["Execution"] == "eager"
    assert inspector.strip.isVisible()
    inspector.shut_down()


def test_arrow_keys_in_the_roofline_go_to_the_next_or_previous_step(show_roofline, recording_with_work, qtbot):
    view = show_roofline(recording_with_work)
    chosen = []
    view.canvas.chosen.disconnect()
    view.canvas.chosen.connect(chosen.append)
    view.canvas.selected = 2
    for key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
        qtbot.keyClick(view.canvas, key)
    assert chosen == [1, 3]


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_roofline_points_and_roofs_have_the_colors_of_the_theme(show_roofline, recording_with_work, theme):
    view = show_roofline(recording_with_work)
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


def test_roofline_of_a_recording_without_step_work_shows_an_explanation(show_roofline, recording_without_work):
    view = show_roofline(recording_without_work)
    assert len(view.points) == 0
    assert view.empty_label.isVisible()
    assert NOT_RECORDED in driver.visible_texts(view)
    assert view.text_label.text() == ""


def test_roofline_range_is_saved_and_restored(show_roofline, recording_with_work, qtbot, tmp_path):
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    view = show_roofline(recording_with_work)
    view.ranges.chosen.emit(1)
    view.save_settings(settings)
    other = RooflineView(view.session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    name = list(ROOFLINE_RANGES_S)[1]
    assert driver.find_button(other.ranges, name).isChecked()
    settings.clear()
    other.save_settings(settings)
    assert settings.value(ROOFLINE_RANGE) == name
    other.shut_down()


def test_hovering_over_a_roofline_point_describes_its_step(show_roofline, recording_with_work, qtbot):
    view = show_roofline(recording_with_work)
    canvas = view.canvas
    assert canvas.point_at(pixel_of_point(view, len(view.points) - 1)) >= 0
    assert canvas.point_at(QPointF(-500, -500)) == -1
    index = next(
        index for index in range(len(view.points)) if canvas.point_at(pixel_of_point(view, index)) != canvas.selected
    )
    text = point_text(view.points, canvas.point_at(pixel_of_point(view, index)), view.device)
    assert not view.text_label.text().startswith(text)

    def hover_shows_the_point():
        """Points that are read meanwhile replace the description, so move the mouse again."""
        for at in (QPointF(1, 1), pixel_of_point(view, index)):
            qtbot.mouseMove(canvas, at.toPoint())
        return view.text_label.text().startswith(text)

    qtbot.waitUntil(hover_shows_the_point, timeout=WAIT_MS)
