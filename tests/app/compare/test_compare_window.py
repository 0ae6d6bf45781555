"""Tests of the window that compares two recordings."""

from __future__ import annotations

import gc
import weakref

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QCoreApplication, QEvent, QPointF, QSettings, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QSplitter
from tests.app import window_driver as driver
from tests.app.compare.conftest import wait_until_settled, write_recording
from tests.app.window_driver import load_only_views
from tests.simulated_engine.command import COMMAND

from kvscope_app.command_line import Options
from kvscope_app.compare.align_bar import CHOSEN, STARTS
from kvscope_app.compare.compare_actions import export_table
from kvscope_app.compare.compare_window import CompareWindow
from kvscope_app.compare.comparison_opener import ask_other, compare_with
from kvscope_app.compare.comparison_text import HEADINGS
from kvscope_app.compare.curves_view import SIDES
from kvscope_app.desktop import Desktop
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_app.playback.recording_opening import RecordingOpening
from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.chart.panel import pause_background
from kvscope_app.views.page_map.color_modes import ATTENTION, FILL
from kvscope_telemetry.exports.comparison.alignment import Alignment
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.bookmark import new_bookmark

WAIT_MS = 120_000
SIMULATED = [*COMMAND, "--endpoint", "{endpoint}", "--blocks", "300"]


@pytest.fixture
def make_compared(paths, themes, qtbot):
    """Function that opens a window on two recordings and waits until it is settled."""

    def make(a=paths[0], b=paths[1]):
        window = CompareWindow(Recording.open(a), Recording.open(b), (a.name, b.name), themes)
        window.resize(1400, 900)
        qtbot.addWidget(window)
        window.show()
        wait_until_settled(window.pair)
        window.refresh_overview()
        return window

    return make


@pytest.fixture
def desktop(qapp, tmp_path):
    made = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    yield made
    for window in list(made.windows):
        window.close()
    made.close()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    made.deleteLater()


@pytest.fixture
def endpoint():
    """Address of an engine in another process."""
    process = EngineProcess(command=SIMULATED)
    process.start()
    yield process.endpoint
    process.close()


def cell_text(window, label, column):
    rows = [row.label for row in window.figures.model.rows]
    return window.figures.model.index(rows.index(label), column).data()


def test_window_names_both_recordings_and_their_differences(make_compared):
    window = make_compared()
    assert window.windowTitle() == "paged.mcap | other.mcap – kvscope"
    assert "blocks 120 | 300" in driver.visible_text(window.figures)
    window.show_texts()
    assert "120 blocks of 16" in driver.visible_text(window.sides[0])
    assert "300 blocks of 16" in driver.visible_text(window.sides[1])


def test_compared_recording_says_that_the_chosen_time_is_before_its_start_or_after_its_end(make_compared):
    window = make_compared()
    window.pair.go_live()
    window.show_texts()
    assert "after the end of this recording" in driver.visible_texts(window.sides[1])
    assert "simulated" in driver.visible_text(window.sides[0])
    window.pair.align(Alignment.of(window.pair.a.timeline.range_ns[1], window.pair.b.timeline.range_ns[0]))
    window.pair.go_live()
    window.pair.go_to(window.pair.origin_ns)
    window.show_texts()
    assert "before the start of this recording" in driver.visible_texts(window.sides[1])


def test_compare_table_shows_the_values_of_both_recordings_and_a_verdict_per_row(make_compared):
    window = make_compared()
    a, b = (session.overview.column("finished").sum() for session in window.sessions)
    assert cell_text(window, "Requests finished", 1) == f"{a:.0f}"
    assert cell_text(window, "Requests finished", 2) == f"{b:.0f}"
    assert cell_text(window, "Tokens generated per second", 1).endswith("tok/s")
    verdicts = [window.figures.model.index(row, 4).data() for row in range(len(window.figures.model.rows))]
    assert all(
        words.startswith(("–", "equal", "not significant: B", "not enough data (n = ", "B ")) for words in verdicts
    )


def test_recording_compared_with_itself_is_equal_in_every_row(make_compared, paths):
    window = make_compared(b=paths[0])
    assert "blocks" not in driver.visible_text(window.figures)
    assert {window.figures.model.index(row, 4).data() for row in range(len(window.figures.model.rows))} <= {
        "equal",
        "–",
    }


def test_compare_table_can_be_copied_and_exported_but_does_not_overwrite_a_file(make_compared, tmp_path):
    window = make_compared()
    window.actions_by_name["copy"].trigger()
    lines = QGuiApplication.clipboard().text().splitlines()
    assert lines[0].split("\t") == list(HEADINGS)
    assert len(lines) == 1 + len(window.figures.model.rows)
    export_table(window, str(tmp_path / "table"))
    assert (tmp_path / "table.csv").read_text("utf-8-sig").startswith("key,label,unit,a,b,")
    export_table(window, str(tmp_path / "table.csv"))
    assert window.banner.text == "The table could not be exported"


def test_playback_bar_and_shortcuts_control_both_recordings(make_compared, qtbot):
    window = make_compared()
    window.pair.go_to(window.pair.origin_ns + 2_000_000_000)
    window.bar.refresh()
    assert window.bar.time.text().startswith("0:02.0 / ")
    window.actions_by_name["forward_little"].trigger()
    wait_until_settled(window.pair)
    assert [session.timeline.player.position for session in window.sessions] == pytest.approx([3.0, 3.0])
    window.actions_by_name["faster"].trigger()
    assert window.pair.speed == 2.0
    window.actions_by_name["play"].trigger()
    assert window.pair.is_playing
    qtbot.keyClick(window.bar.slider, Qt.Key.Key_Space)
    assert not window.pair.is_playing
    assert [action.toString() for action in window.actions_by_name["play"].shortcuts()] == ["Space"]


def test_time_chosen_for_one_side_aligns_it_with_the_other(make_compared):
    window = make_compared()
    assert window.align.currentText() == STARTS
    window.pair.go_to(window.pair.origin_ns + 1_000_000_000)
    wait_until_settled(window.pair)
    window.sides[1].moment.setMaximum(3.0)
    window.sides[1].moment.setValue(2.5)
    wait_until_settled(window.pair)
    assert window.align.currentText() == CHOSEN
    assert [session.timeline.player.position for session in window.sessions] == pytest.approx([1.0, 2.5])
    window.pair.jump_by(0.5)
    wait_until_settled(window.pair)
    assert [session.timeline.player.position for session in window.sessions] == pytest.approx([1.5, 3.0])


def test_time_field_keeps_typed_text_and_returns_the_focus_to_the_map(make_compared, qtbot):
    window = make_compared()
    window.show_texts()
    field = window.sides[1].moment
    window.activateWindow()
    field.setFocus()
    qtbot.waitUntil(field.hasFocus, timeout=WAIT_MS)
    field.selectAll()
    qtbot.keyClicks(field, "2.5")
    window.show_texts()
    assert field.text().startswith("2.5")
    qtbot.keyClick(field, Qt.Key.Key_Return)
    wait_until_settled(window.pair)
    assert window.sessions[1].timeline.player.position == pytest.approx(2.5)
    assert window.focusWidget() is window.sides[1].map.canvas
    window.pair.jump_by(0.5)
    wait_until_settled(window.pair)
    window.show_texts()
    assert field.value() == pytest.approx(3.0, abs=0.05)


def test_recordings_can_be_aligned_by_common_bookmarks_and_peaks(make_compared):
    window = make_compared()
    for session in window.sessions:
        session.bookmarks.load([new_bookmark(session.timeline.range_ns[0] + 1, "the load begins")])
    window.refresh_overview()
    names = [window.align.itemText(index) for index in range(window.align.count())]
    assert names[:2] == ["Starts together", "By the clock"]
    assert "The load begins" in names
    assert "Peak of KV usage" in names
    window.align.textActivated.emit("Peak of KV usage")
    wait_until_settled(window.pair)
    peaks = [moments["Peak of KV usage"] for moments in [window.align.alignments]]
    assert window.pair.cursor_ns == peaks[0][1]
    assert window.pair.alignment == peaks[0][0]


def test_figures_can_be_limited_to_the_time_shown(make_compared):
    window = make_compared()
    whole = cell_text(window, "Length", 1)
    window.curves.show_time(1.0, 3.0)
    window.figures.select_range(True)
    window.refresh_figures()
    assert cell_text(window, "Length", 1) == cell_text(window, "Length", 2) == "2.00 s"
    window.actions_by_name["whole_time"].trigger()
    assert cell_text(window, "Length", 1) == whole


def test_curves_of_both_recordings_have_different_styles(make_compared):
    window = make_compared()
    panel = window.curves.panels["usage"]
    shapes = [panel.curve_items[look.name].getData()[0].size for look in SIDES]
    assert shapes[0] > shapes[1] > 2
    styles = [panel.curve_items[look.name].opts["pen"].style() for look in SIDES]
    assert styles == [Qt.PenStyle.SolidLine, Qt.PenStyle.DashLine]
    window.pair.go_to(window.pair.origin_ns + 2_000_000_000)
    assert panel.legend.values["A"].endswith("%")
    panel.chosen.emit(3.0)
    assert window.pair.cursor_ns == window.pair.origin_ns + 3_000_000_000
    window.pair.go_live()
    assert panel.legend.values["B"] == "–"


def test_pause_of_one_recording_is_shaded_in_its_half_of_the_chart(make_compared, tmp_path, paths):
    recording = Recording.open(paths[1])
    (tmp_path / "paused").mkdir()
    with RecordingWriter(tmp_path / "paused" / "other.mcap") as writer:
        for at_s, message in recording.messages():
            if isinstance(message, Frame) and message.seq in (100, 200):
                kind = "engine_paused" if message.seq == 100 else "engine_resumed"
                about = EventData(kind=kind, by="Ada")
                event = Event(kind=kind, time_ns=message.time_ns, data=about)
                message = replace(message, events=[*message.events, event])
            writer.write(message, wait=True, log_time_ns=recording.start_ns + round(at_s * 1e9))
    window = make_compared(b=tmp_path / "paused" / "other.mcap")
    panel = window.curves.panels["decode"]
    ((first, last),) = [(band.first_s, band.last_s) for band in panel.stop_bands.bands]
    frames = {frame.seq: frame.time_ns for frame in recording.frames()}
    assert last - first == pytest.approx((frames[200] - frames[100]) / 1e9)
    middle = (first + last) / 2
    assert panel.stop_bands.text_at(middle).startswith("B paused by Ada, ")
    assert panel.stop_bands.text_at(last + 0.1) == ""
    panel.finish_layout()
    view, picture = panel.plot.view_box, panel.plot.grab().toImage()
    top = view.viewRange()[1][1]
    shown = [panel.plot.mapFromScene(view.mapViewToScene(QPointF(middle, share * top))) for share in (0.97, 0.04)]
    assert [picture.pixelColor(place).name() == pause_background(DARK) for place in shown] == [False, True]
    window.pair.align(Alignment(), window.pair.origin_ns)
    assert panel.stop_bands.bands[0].first_s == pytest.approx(first + 0.3, abs=0.05)  # B began 0.3 s later


def test_both_maps_share_the_color_mode(make_compared):
    window = make_compared()
    window.actions_by_name["color_owner"].trigger()
    assert [side.map.mode.name for side in window.sides] == ["owner", "owner"]
    driver.click_button(window.sides[1].map, "Colour by: Fill")
    assert [side.map.mode.name for side in window.sides] == ["fill", "fill"]


def test_compare_window_follows_the_theme(make_compared, themes):
    window = make_compared()
    dark = window.grab().toImage().pixelColor(5, 300)
    themes.choose("light")
    QApplication.processEvents()
    assert window.sides[0].map.theme is LIGHT
    assert window.grab().toImage().pixelColor(5, 300).lightness() > dark.lightness() + 100


def test_closed_compare_window_leaks_nothing(make_compared):
    gone = []
    for _ in range(2):
        window = make_compared()
        gone += [weakref.ref(each) for each in (window, window.pair, *window.sessions, *window.sides, window.curves)]
        window.close()
        window.deleteLater()
        del window
    for _ in range(3):
        QCoreApplication.processEvents()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    gc.collect()
    assert not [reference() for reference in gone if reference() is not None]


def test_compare_command_of_a_recording_window_opens_a_comparison_that_outlives_the_window(desktop, paths, qtbot):
    window = desktop.open_recording(Recording.open(paths[0]))
    load_only_views(window)
    qtbot.waitUntil(lambda: window.session.timeline.range_ns is not None, timeout=WAIT_MS)
    compare_with(window, str(paths[1]))
    qtbot.waitUntil(lambda: bool(desktop.comparisons), timeout=WAIT_MS)
    assert desktop.comparisons[0].windowTitle() == "paged.mcap | other.mcap – kvscope"
    window.close()
    assert desktop.comparisons[0].isVisible()
    desktop.comparisons[0].close()
    assert not desktop.comparisons


def test_comparison_with_a_live_session_grows_and_closes_with_its_window(desktop, endpoint, paths, qtbot):
    desktop.attach(endpoint)
    window = desktop.windows[-1]
    load_only_views(window)
    qtbot.waitUntil(lambda: window.session.timeline.range_ns is not None, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: len(window.session.overview) > 0, timeout=WAIT_MS)
    compare_with(window, str(paths[1]))
    qtbot.waitUntil(lambda: bool(desktop.comparisons), timeout=WAIT_MS)
    comparison = desktop.comparisons[0]
    assert comparison.windowTitle() == "live | other.mcap – kvscope"
    own = comparison.sessions[0]
    length = own.timeline.range_ns[1] - own.timeline.range_ns[0]
    qtbot.waitUntil(lambda: own.timeline.range_ns[1] - own.timeline.range_ns[0] > length, timeout=WAIT_MS)
    assert not window.session.timeline.is_paused  # the comparison has its own cursor
    window.close()
    assert not desktop.comparisons


def test_comparison_with_a_damaged_file_shows_the_banner(desktop, paths, qtbot, tmp_path):
    broken = tmp_path / "broken.mcap"
    broken.write_bytes(b"nothing of the kind")
    window = desktop.open_recording(Recording.open(paths[0]))
    load_only_views(window)
    compare_with(window, str(broken))
    qtbot.waitUntil(lambda: bool(window.banner.text), timeout=WAIT_MS)
    assert window.banner.text == "The file cannot be opened"
    assert not desktop.comparisons


def test_comparison_of_a_session_without_history_shows_a_message(session, make_window):
    window = make_window(session)
    ask_other(window)
    assert "no history" in window.statusBar().currentMessage()


def test_two_recordings_of_the_command_line_open_side_by_side(desktop, paths, qtbot):
    openings = [RecordingOpening(str(path)) for path in paths]
    assert openings[0].wait(240)
    desktop.compare_when_ready(openings)
    qtbot.waitUntil(lambda: bool(desktop.comparisons), timeout=WAIT_MS)
    assert "other.mcap" in driver.visible_texts(desktop.comparisons[0].sides[1])


def test_overview_is_computed_for_a_truncated_recording(make_compared, tmp_path, paths):
    """The end of the truncated recording has no summaries."""
    cut = tmp_path / "cut.mcap"
    whole = write_recording(tmp_path / "whole.mcap", 400, 80)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    window = make_compared(b=cut)
    assert len(window.sessions[1].overview)
    window.show_texts()
    assert "truncated" in driver.visible_text(window.sides[1])
    assert cell_text(window, "KV usage, mean", 2).endswith("%")


def test_size_and_splits_of_a_comparison_are_saved_and_restored(desktop, paths, qtbot):
    def opened():
        return desktop.compare(Recording.open(paths[0]), Recording.open(paths[1]))

    def shares(window):
        return {each.objectName(): each.sizes() for each in window.findChildren(QSplitter) if each.objectName()}

    first = opened()
    first.resize(first.width(), 640)  # fits the screen of a test, as every restored size must
    QCoreApplication.sendPostedEvents()
    for splitter in first.findChildren(QSplitter):
        splitter.setSizes([300, 500])
    chosen = shares(first)
    assert set(chosen) == {"body", "maps", "below"}
    second = opened()
    assert second.height() != 640  # offset from the first window
    second.close()
    first.close()
    again = opened()
    assert again.height() == 640
    QCoreApplication.sendPostedEvents()
    assert shares(again) == chosen
    again.close()


def test_color_mode_that_one_recording_lacks_applies_to_the_other(make_compared):
    window = make_compared()
    first, second = (side.map for side in window.sides)
    assert first.why_not(ATTENTION)
    first.set_mode(ATTENTION)
    assert not first.mode == second.mode == ATTENTION
    second.set_mode(FILL)
    assert first.mode == second.mode == FILL
