"""Tests of the page map view: colours on screen, mouse, keyboard, cards and selection."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QImage, QWheelEvent
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver

from kvscope_app.session.block_texts import session_texts
from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.inspector.findings import findings
from kvscope_app.views.page_map import page_map_canvas as canvas_module
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.page_map.color_modes import ATTENTION, COLOR_MODES, SKIPPED_BY_ALL, STATE, UNMEASURED
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_telemetry.ledger import BlockState, attention_units
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.source import Update
from kvscope_telemetry.summaries.session_overview import SessionOverview


@pytest.fixture
def show_page_map(qtbot, themes):
    def make(session, size=(720, 520)):
        view = PageMapView(session)
        qtbot.addWidget(view)
        view.apply_theme(DARK)
        view.resize(*size)
        view.set_flashing(False)
        view.show()
        view.refresh()
        qtbot.mouseMove(view, QPoint(0, 0))
        QApplication.sendEvent(view.canvas, QEvent(QEvent.Type.Leave))  # the mouse may have been over a block already
        return view

    return make


def color_at(view, block):
    """Return the colour in the left part of a block, next to its number."""
    image = view.canvas.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    cell = view.canvas.cell_rect(block)
    point = cell.topLeft() + QPoint(cell.width() // 4, cell.height() // 5)
    return image.pixelColor(point * image.devicePixelRatio()).name()


def test_page_map_shows_free_active_and_cached_blocks_in_their_colors(engine, session, show_page_map, poll):
    view = show_page_map(session)
    assert color_at(view, 0) == DARK.block_free
    engine.write_blocks([0, 63])
    engine.write_blocks([10], state=BlockState.CACHED, ref_count=0)
    poll(session)
    view.refresh()
    assert color_at(view, 0) == color_at(view, 63) == DARK.block_active
    assert color_at(view, 10) == DARK.block_cached
    assert color_at(view, 11) == DARK.block_free


def test_page_map_follows_the_theme(engine, session, show_page_map, poll):
    engine.write_blocks([5])
    poll(session)
    view = show_page_map(session)
    view.apply_theme(LIGHT)
    assert color_at(view, 5) == LIGHT.block_active
    assert color_at(view, 6) == LIGHT.block_free


def test_summary_shows_block_counts_and_sizes(engine, session, show_page_map, poll):
    engine.write_blocks([0, 1, 2])
    poll(session)
    view = show_page_map(session)
    text = view.summary.longest
    for part in ("64 blocks", "3 active", "0 cached", "61 free", "16 tokens, 360.0 KiB each"):
        assert part in text


def test_hovering_over_a_block_shows_its_card_and_requests_its_text(engine, session, show_page_map, poll, qtbot):
    engine.request(2, blocks=[7, 8])
    engine.write_blocks([7, 8], owner=2, filled=13)
    poll(session)
    view = show_page_map(session)
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(7).center())
    assert view.card.isVisible()
    assert "Block 7" in driver.visible_text(view.card)
    assert "13 of 16 tokens" in driver.visible_text(view.card)
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=120_000)
    (question,) = engine.source.sent
    assert isinstance(question, GetBlockText)
    assert question.blocks == (7,)
    notes = (("LoRA", "sql"),)
    content = BlockContent(block=7, number=2, start=0, token_ids=(1, 2), text="Once upon\na time", notes=notes)
    engine.source.replies.append(BlockText(contents=(content,), tag=question.tag))
    poll(session)
    assert "Once upon" in driver.visible_text(view.card)
    assert "sql" in driver.visible_text(view.card)


def test_block_text_is_requested_once_and_cached(engine, session, show_page_map, poll, qtbot, monkeypatch):
    monkeypatch.setattr(session_texts, "REPLY_TIMEOUT_MS", 60_000)  # long enough for an answer on a slow machine
    engine.write_blocks([7, 8])
    poll(session)
    view = show_page_map(session)
    for block in (7, 8, 7):
        qtbot.mouseMove(view.canvas, view.canvas.cell_rect(block).center())

    def is_available():
        for question in list(engine.source.sent)[len(answered) :]:
            contents = tuple(BlockContent(block=b, token_ids=(1,), text=f"kept {b}") for b in question.blocks)
            engine.source.replies.append(BlockText(contents=contents, tag=question.tag))
            answered.extend([question])
        poll(session)
        return "kept 7" in driver.visible_texts(view.card)

    answered = []
    qtbot.waitUntil(is_available, timeout=30_000)
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(20).center())
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(7).center())
    assert "kept 7" in driver.visible_texts(view.card)
    assert [block for question in engine.source.sent for block in question.blocks].count(7) == 1


def test_text_of_a_free_block_is_not_requested(engine, session, show_page_map, qtbot):
    view = show_page_map(session)
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(3).center())
    assert view.card.isVisible()
    qtbot.wait(120)  # longer than the pause between questions
    assert engine.source.sent == []


def test_block_card_ignores_text_replies_for_other_blocks(engine, session, show_page_map, poll, qtbot):
    engine.write_blocks([7])
    poll(session)
    view = show_page_map(session)
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(7).center())
    qtbot.waitUntil(lambda: engine.source.sent != [], timeout=120_000)
    other = BlockText(contents=(BlockContent(block=9, token_ids=(1,), text="not ours"),), tag=3)
    engine.source.replies.append(other)
    poll(session)
    assert "not ours" not in driver.visible_text(view.card)


def test_click_on_a_block_selects_its_request(engine, session, show_page_map, poll, qtbot):
    engine.request(2, blocks=[7, 8])
    engine.write_blocks([7, 8], owner=2)
    engine.write_blocks([9], owner=3)
    poll(session)
    view = show_page_map(session)
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=view.canvas.cell_rect(7).center())
    assert session.selection.request == 2
    assert color_at(view, 8) == DARK.block_active
    assert color_at(view, 9) != DARK.block_active
    qtbot.keyClick(view.canvas, Qt.Key.Key_Escape)
    assert session.selection.request is None
    assert color_at(view, 9) == DARK.block_active


def test_reserved_block_id_in_a_table_is_no_block_of_the_request(engine, make_session, show_page_map, poll):
    engine.hello = replace(engine.hello, cache=replace(engine.hello.cache, num_reserved_blocks=1))
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    engine.request(2, blocks=[0, 0, 7, 8])
    engine.write_blocks([7, 8], owner=2)
    session = make_session(engine)
    poll(session)
    view = show_page_map(session)
    before = color_at(view, 0)
    session.selection.select_request(2)
    assert color_at(view, 7) == DARK.block_active
    assert color_at(view, 0) != before, "block 0 is dimmed, because it does not belong to the request"
    assert [finding.detail for finding in findings("#2", session.mirror, SessionOverview())] == [
        "running, 2 blocks  ·  chat-2"
    ]


def test_clicks_on_a_shared_block_cycle_through_its_holders(engine, session, show_page_map, poll, qtbot):
    engine.request(2, blocks=[7])
    engine.request(5, blocks=[7])
    engine.write_blocks([7], owner=2, ref_count=2)
    poll(session)
    view = show_page_map(session)
    chosen = []
    for _ in range(3):
        qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=view.canvas.cell_rect(7).center())
        chosen.append(session.selection.request)
    assert chosen == [2, 5, 2]


def test_selected_finished_request_shows_its_cached_blocks(engine, session, show_page_map, poll):
    engine.request(4, blocks=[], state=3)
    engine.write_blocks([30, 31], owner=4, state=BlockState.CACHED, ref_count=0)
    engine.write_blocks([40], owner=5)
    poll(session)
    view = show_page_map(session)
    session.selection.select_request(4)
    assert color_at(view, 30) == DARK.block_cached
    assert color_at(view, 40) != DARK.block_active


def test_ended_request_still_shows_the_cached_blocks_that_it_reused(engine, session, show_page_map, poll):
    engine.ledger.hash[[20, 30]], engine.ledger.parent[30] = (101, 102), 101
    engine.write_blocks([20], owner=3, state=BlockState.CACHED, ref_count=0)
    engine.write_blocks([30], owner=4, state=BlockState.CACHED, ref_count=0)
    engine.write_blocks([40], owner=5, state=BlockState.CACHED, ref_count=0)
    poll(session)
    view = show_page_map(session)
    session.selection.select_request(4)
    assert [color_at(view, block) == DARK.block_cached for block in (20, 30, 40)] == [True, True, False]


def test_ended_request_that_wrote_no_full_block_shows_those_it_reused(engine, session, show_page_map, poll):
    engine.ledger.hash[[20, 30]], engine.ledger.parent[30] = (101, 102), 101
    engine.write_blocks([20, 30], owner=3)
    engine.write_blocks([31], owner=4, filled=5)
    engine.request(4, (20, 30, 31))
    poll(session)
    engine.request(4, (), state=3)
    engine.write_blocks([20, 30], owner=3, state=BlockState.CACHED, ref_count=0)
    engine.write_blocks([31], owner=-1, filled=0, state=BlockState.FREE, ref_count=0)
    engine.write_blocks([40], owner=5, state=BlockState.CACHED, ref_count=0)
    poll(session)
    view = show_page_map(session)
    session.selection.select_request(4)
    assert [color_at(view, block) == DARK.block_cached for block in (20, 30, 40)] == [True, True, False]


def test_selected_request_without_blocks_does_not_dim_the_map(engine, session, show_page_map, poll):
    engine.request(4, (5, 6))
    engine.write_blocks([5, 6, 9], owner=4)
    poll(session)
    view = show_page_map(session)
    session.selection.select_request(4)
    view.refresh()
    assert color_at(view, 9) != DARK.block_active
    engine.request(4, (), state=3)
    engine.write_blocks([5, 6, 9], owner=7)
    poll(session)
    view.refresh()
    assert color_at(view, 9) == DARK.block_active


def test_block_added_to_the_selected_request_is_not_dimmed_on_the_page_map(engine, session, show_page_map, poll):
    engine.request(2, blocks=[7])
    engine.write_blocks([7], owner=2)
    poll(session)
    view = show_page_map(session)
    session.selection.select_request(2)
    engine.request(2, blocks=[7, 20])
    engine.write_blocks([20], owner=2)
    poll(session)
    view.refresh()
    assert color_at(view, 20) == DARK.block_active


def test_arrow_keys_move_a_cursor_with_accessible_description(engine, session, show_page_map, poll, qtbot):
    engine.request(2, blocks=[1])
    engine.write_blocks([1], owner=2)
    poll(session)
    view = show_page_map(session)
    view.canvas.setFocus()
    qtbot.waitUntil(view.canvas.hasFocus)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Right)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Right)
    assert view.canvas.pointed_block == 1
    assert view.canvas.accessibleDescription().startswith("Block 1: active, owner request #2")
    qtbot.keyClick(view.canvas, Qt.Key.Key_Down)
    assert view.canvas.pointed_block == 1 + view.scene.grid.columns
    qtbot.keyClick(view.canvas, Qt.Key.Key_Up)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Return)
    assert session.selection.request == 2


def test_page_map_cursor_stays_inside_the_pool(session, show_page_map, qtbot):
    view = show_page_map(session)
    view.canvas.setFocus()
    for key in (Qt.Key.Key_Left, Qt.Key.Key_Up, Qt.Key.Key_PageUp):
        qtbot.keyClick(view.canvas, key)
        assert view.canvas.pointed_block == 0
    for _ in range(30):
        qtbot.keyClick(view.canvas, Qt.Key.Key_PageDown)
    assert view.canvas.pointed_block == 63


def test_wheel_zooms_the_page_map_at_the_pointer_and_fit_resets_the_zoom(make_engine, make_session, show_page_map):
    view = show_page_map(make_session(make_engine(num_blocks=5000)))
    position = QPointF(300, 200)
    before = view.scene.block_at(*view.canvas.to_scene(position))
    whole = view.scene.camera
    wheel(view.canvas, position, 4)
    assert view.scene.camera.pitch > whole.pitch * 1.8
    after = view.scene.block_at(*view.canvas.to_scene(position))
    row, column = divmod(after, view.scene.grid.columns)
    old_row, old_column = divmod(before, view.scene.grid.columns)
    assert abs(row - old_row) <= 1
    assert abs(column - old_column) <= 1
    view.fit_all()
    assert view.scene.camera == whole


def test_dragging_pans_the_page_map_without_selecting_a_block(make_engine, make_session, show_page_map, qtbot):
    engine = make_engine(num_blocks=5000)
    engine.write_blocks(range(5000))
    session = make_session(engine)
    view = show_page_map(session)
    view.canvas.zoom(3.0)
    x = view.scene.camera.x
    qtbot.mousePress(view.canvas, Qt.MouseButton.LeftButton, pos=QPoint(300, 200))
    qtbot.mouseMove(view.canvas, QPoint(340, 200))
    qtbot.mouseRelease(view.canvas, Qt.MouseButton.LeftButton, pos=QPoint(340, 200))
    assert view.scene.camera.x == x + 40
    assert session.selection.request is None


def test_attention_mode_is_refused_if_attention_is_not_measured(engine, session, show_page_map):
    view = show_page_map(session)
    view.set_mode(ATTENTION)
    assert view.mode is STATE
    assert "--page-heat 16" in view.why_not(ATTENTION)


def test_attention_mode_shows_sparse_decode_choices_if_attention_is_not_measured(
    make_engine, make_session, show_page_map, poll
):
    engine = make_engine(capabilities=Capabilities(sparse_decode=True))
    session = make_session(engine)
    engine.ledger.skipped[3] = attention_units(np.array([1.0], np.float32))[0]
    engine.write_blocks(range(10))
    poll(session)
    view = show_page_map(session)
    view.set_mode(ATTENTION)
    assert view.mode is ATTENTION
    name = view.legend.accessibleName()
    assert "from selected by few heads to by all" in name
    assert "skipped by all" in name
    assert color_at(view, 3) == ATTENTION.colors(DARK)[SKIPPED_BY_ALL]
    assert color_at(view, 4) == ATTENTION.colors(DARK)[UNMEASURED]


@pytest.mark.parametrize("mode", COLOR_MODES, ids=str)
def test_each_color_mode_is_drawn_and_has_a_legend(mode, make_engine, make_session, show_page_map, poll):
    engine = make_engine(capabilities=Capabilities(attention=True, groups=True, eviction_order=True))
    session = make_session(engine)
    engine.write_blocks(range(10), filled=5)
    poll(session)
    view = show_page_map(session)
    view.set_mode(mode)
    assert mode.name in view.legend.accessibleName()
    assert view.grab().toImage().width() > 0
    assert color_at(view, 0) != DARK.block_free


def test_page_map_zoom_is_reset_to_fit_the_pool_of_a_new_engine_run(engine, session, show_page_map, poll, make_engine):
    view = show_page_map(session)
    view.canvas.zoom(3.0)
    bigger = make_engine(num_blocks=300, epoch=9)
    bigger.write_blocks([299])
    engine.source.updates.extend(bigger.source.updates)
    poll(session)
    view.refresh()
    assert view.scene.is_fitted
    assert color_at(view, 299) == DARK.block_active


def test_paused_map_is_frozen_and_catches_up_when_live(engine, session, show_page_map, poll):
    view = show_page_map(session)
    session.timeline.pause()
    view.refresh()
    engine.write_blocks([12])
    poll(session)
    view.refresh()
    assert color_at(view, 12) == DARK.block_free
    session.timeline.go_live()
    view.refresh()
    assert color_at(view, 12) == DARK.block_active


def test_idle_cached_block_is_described_with_last_owner_and_last_use(engine, session, poll):
    engine.write_blocks([3], owner=8, state=BlockState.CACHED, ref_count=0, step=1)
    engine.frame()
    poll(session)
    facts = block_facts(session.mirror, 3, 16)
    assert facts.state == "cached"
    assert facts.holders == ()
    assert facts.owner == 8
    assert "1 step ago" in facts.sentence


def eviction_orders(session, *blocks):
    """Return the fact `Eviction order` of each block, or None."""
    return [dict(block_facts(session.mirror, block, 16).rows).get("Eviction order") for block in blocks]


def test_block_facts_rank_cached_blocks_for_eviction_after_free_blocks(make_engine, make_session, poll):
    engine = make_engine(num_blocks=8, num_host=2)
    session = make_session(engine)
    engine.ledger.eviction_order[[3, 4, 8]] = [80, 75, 2]
    engine.write_blocks([3, 4, 5, 8], owner=8, state=BlockState.CACHED, ref_count=0, step=1)
    engine.frame()
    poll(session)
    assert eviction_orders(session, 3, 4, 5, 8) == [
        "no. 2 of 2 cached blocks, after 5 free blocks",
        "next of 2 cached blocks, after 5 free blocks",
        None,
        "next of 1 cached block",
    ]


def test_block_facts_rank_free_and_cached_blocks_together_if_they_share_one_queue(make_engine, make_session, poll):
    engine = make_engine(num_blocks=4)
    session = make_session(engine)
    engine.ledger.eviction_order[:] = [10, 0, 30, 20]
    engine.write_blocks([1], owner=8)
    engine.write_blocks([2, 3], owner=8, state=BlockState.CACHED, ref_count=0)
    engine.frame(range(4))
    poll(session)
    assert eviction_orders(session, 1, 2, 3) == [
        None,
        "no. 3 of 3 blocks that may be allocated",
        "no. 2 of 3 blocks that may be allocated",
    ]


def test_chosen_kv_group_is_highlighted(engine, session, show_page_map, poll):
    groups = (KVGroup(kind="full"), KVGroup(kind="window", window=64))
    engine.hello = replace(engine.hello, cache=replace(engine.hello.cache, groups=groups))
    engine.ledger.group[[4, 5]] = 1
    engine.write_blocks([3, 4, 5])
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(session)
    view = show_page_map(session)
    view.draw_all()
    assert view.group.isVisible()
    assert [view.group.itemText(place) for place in range(3)][:2] == ["All KV groups", "0: full attention"]
    bright = color_at(view, 3)
    view.group.setCurrentIndex(2)
    assert color_at(view, 3) != bright
    assert color_at(view, 4) == bright
    view.group.setCurrentIndex(0)
    assert color_at(view, 3) == bright


def test_block_numbers_are_redrawn_only_after_zooming(engine, session, show_page_map, poll, monkeypatch):
    view = show_page_map(session)
    assert view.canvas.gutter
    drawn = []
    monkeypatch.setattr(canvas_module, "draw_gutter", lambda *rest: drawn.append(1))
    QApplication.processEvents()
    drawn.clear()
    engine.write_blocks([0, 63])
    poll(session)
    view.refresh()
    QApplication.processEvents()
    assert not drawn
    assert color_at(view, 0) == DARK.block_active
    drawn.clear()
    view.canvas.zoom(2.0)
    QApplication.processEvents()
    assert drawn


def test_frame_of_a_million_blocks_is_drawn_within_60_ms(make_engine, make_session, show_page_map, poll):
    import time

    engine = make_engine(num_blocks=1_000_000)
    session = make_session(engine)
    view = show_page_map(session, size=(1200, 800))
    view.set_flashing(True)
    rng = np.random.default_rng(1)
    times = []
    for _ in range(40):
        engine.write_blocks(rng.integers(0, 1_000_000, 2500))
        poll(session)
        began = time.thread_time_ns()
        view.refresh()
        view.canvas.repaint()
        times.append((time.thread_time_ns() - began) / 1e6)
    assert np.median(times) < 60.0, f"median {np.median(times):.1f} ms of CPU time per frame"


def wheel(widget, position, steps):
    event = QWheelEvent(
        position,
        widget.mapToGlobal(position),
        QPoint(0, 0),
        QPoint(0, 120 * steps),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    widget.wheelEvent(event)
