"""Tests of the dialog of PyTorch memory segments: question, answer, refusals and missing answers."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from PySide6.QtCore import QPoint
from PySide6.QtGui import QGuiApplication
from tests.simulated_engine.allocator_map import simulated_allocator_map

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.memory.segments.segment_figures import fragmentation, omission_text, segment_tip
from kvscope_app.views.memory.segments.segments_sheet import NOT_IN_RECORDING, NOT_REPORTED, why_not
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import AllocatorMap, Failed, GetAllocatorMap
from kvscope_telemetry.mirror.allocator_map import pack_map, unpack_map

TELLS = Capabilities(allocator_map=True)


@pytest.fixture
def make_view(make_engine, make_session, poll, qtbot):
    """Function that returns a memory view, its engine and its session."""

    def make(capabilities=TELLS):
        engine = make_engine(capabilities=capabilities)
        session = make_session(engine)
        poll(session)
        view = MemoryView(session)
        qtbot.addWidget(view)
        view.refresh()
        return view, engine, session

    return make


@pytest.fixture
def open_dialog(make_view):
    """Function that opens the dialog and returns it with a function that answers its question."""

    views = []

    def make():
        view, engine, session = make_view()
        views.append(view)
        view.segments_button.click()

        def answer(reply, to_other=0):
            """Answer the last question; `to_other` shifts the tag to that of another question."""
            asked = [command for command in engine.source.sent if isinstance(command, GetAllocatorMap)]
            engine.source.replies.append(msgspec.structs.replace(reply, tag=asked[-1].tag + to_other))
            session.poll()

        return view.segments_sheet, answer

    yield make
    views.clear()


def test_segments_dialog_shows_the_engines_allocator_map(open_dialog):
    sheet, answer = open_dialog()
    assert not sheet.reload.isEnabled()
    allocator_map = simulated_allocator_map(0)
    answer(allocator_map)
    assert sheet.value("Segments") == str(allocator_map.num_segments)
    assert sheet.value("Held") == "8.02 GiB"
    assert sheet.reload.isEnabled()
    assert sheet.copy.isEnabled()


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
@pytest.mark.parametrize("to_scale", [True, False])
def test_segments_are_painted_in_the_colors_of_their_state(open_dialog, theme, to_scale):
    sheet, answer = open_dialog()
    answer(simulated_allocator_map(0))
    sheet.apply_theme(theme)
    sheet.to_scale.setChecked(to_scale)
    sheet.bars.resize(900, sheet.bars.minimumHeight())
    shown = sheet.bars.grab().toImage()
    colors = {shown.pixelColor(x, y).name() for y in range(12, shown.height(), 24) for x in range(170, shown.width())}
    assert {theme.color("block_active").name(), theme.color("block_cached").name()} <= colors


def test_tooltip_describes_the_segment_or_block_under_the_mouse(open_dialog):
    sheet, answer = open_dialog()
    assert sheet.bars.tip_at(QPoint(300, 10)) == ""
    answer(simulated_allocator_map(0))
    sheet.bars.resize(900, sheet.bars.minimumHeight())
    assert sheet.bars.tip_at(QPoint(300, 10)).startswith("4.00 GiB allocated, 0 B into its segment")
    assert "at 0x7f0000000000: 1 block" in sheet.bars.tip_at(QPoint(10, 10))
    assert sheet.bars.tip_at(QPoint(300, -1)) == ""


def test_copied_text_has_one_line_per_block(open_dialog):
    sheet, answer = open_dialog()
    allocator_map = simulated_allocator_map(0)
    answer(allocator_map)
    sheet.copy.click()
    lines = QGuiApplication.clipboard().text().splitlines()
    assert len(lines) == allocator_map.num_blocks + 1
    assert lines[1].split("\t") == ["0x7f0000000000", str(4 << 30), "large", "0", "0", str(4 << 30), "allocated"]


def test_refused_request_for_allocator_segments_shows_the_reason_and_can_be_repeated(open_dialog):
    sheet, answer = open_dialog()
    answer(simulated_allocator_map(0))
    sheet.reload.click()
    answer(Failed(reason="the engine runs on 'cpu'"))
    assert sheet.message.text() == "The engine runs on 'cpu'"
    assert sheet.message.isVisibleTo(sheet)
    assert not sheet.copy.isEnabled()
    sheet.reload.click()
    answer(simulated_allocator_map(0))
    assert not sheet.message.isVisibleTo(sheet)


def test_empty_or_damaged_allocator_map_is_reported_in_the_segments_dialog(open_dialog):
    sheet, answer = open_dialog()
    answer(pack_map([]))
    assert sheet.message.text() == "PyTorch holds no device memory"
    sheet.reload.click()
    answer(AllocatorMap(segment_pool=b"\1"))
    assert "columns of segments differ" in sheet.message.text()


def test_segments_dialog_ignores_replies_to_requests_of_others(open_dialog):
    sheet, answer = open_dialog()
    answer(simulated_allocator_map(0), to_other=-1)
    answer(Failed(reason="x"), to_other=1)
    assert not sheet.reload.isEnabled()
    answer(simulated_allocator_map(0))
    assert sheet.reload.isEnabled()


@pytest.mark.parametrize("capabilities", [Capabilities(), Capabilities(engine="vllm", commands=False)])
def test_segments_button_states_why_it_is_disabled(make_view, capabilities):
    view, _, _ = make_view(capabilities)
    assert not view.segments_button.isEnabled()
    assert view.segments_button.toolTip() == NOT_REPORTED


def test_allocator_map_of_a_recording_is_refused_with_the_reason():
    playback = SimpleNamespace(provides_allocator_map=False, timeline=SimpleNamespace(is_file=True))
    assert why_not(playback) == NOT_IN_RECORDING


def test_segments_dialog_states_how_many_segments_are_left_out_and_blocks_merged():
    whole = simulated_allocator_map(0)
    allocator_map = pack_map(unpack_map(whole), max_blocks=100)
    assert "the smallest neighbours are merged" in omission_text(allocator_map, unpack_map(allocator_map))
    assert omission_text(whole, unpack_map(whole)) == ""
    cut = pack_map(unpack_map(whole), max_segments=3)
    assert "the largest 3 of 26 segments" in omission_text(cut, unpack_map(cut))
    assert fragmentation(pack_map([])) is None
    assert "4.00 GiB allocated" in segment_tip(unpack_map(whole)[0])


def test_late_allocator_map_is_shown_after_the_segments_dialog_reported_waiting(open_dialog):
    sheet, answer = open_dialog()
    sheet._slow_timer.timeout.emit()
    assert "Waiting for the engine" in sheet.message.text()
    assert sheet.reload.isEnabled()
    answer(simulated_allocator_map(0))
    assert sheet.value("Blocks") == "762"
