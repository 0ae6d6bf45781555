"""Tests of the prefix tree view: rows, opening, sorting, filters, selection and texts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QGuiApplication
from tests.app import window_driver as driver

from kvscope_app.session.block_texts.session_texts import FOR_OPERATORS
from kvscope_app.session.session import Session
from kvscope_app.setting_names import PREFIX_ORDER
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_app.views.prefixes import tree_builder
from kvscope_app.views.prefixes.prefix_columns import COLUMNS
from kvscope_app.views.prefixes.prefixes_view import NO_CACHE, NO_PARENTS, NOTHING_YET, SEVERAL_GROUPS, PrefixesView
from kvscope_app.views.prefixes.shown_nodes import PrefixFilter
from kvscope_app.views.prefixes.step_times import UNKNOWN, StepTimes
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import KVGroup
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.source import Update
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

WORDS = {4: "You are", 9: " a helpful", 17: " poet.\nSing", 18: " cook.", 19: " Stir", 30: "Once upon"}


@pytest.fixture
def engine(make_engine):
    return make_engine(num_host=8)


@pytest.fixture
def view(engine, session, poll, qtbot):
    fill_tree(engine)
    poll(session)
    made = PrefixesView(session)
    qtbot.addWidget(made)
    made.resize(1100, 500)
    made.apply_theme(THEMES["dark"])
    made.show()
    made.refresh()
    yield made
    made.shut_down()


def write_chain(engine, text, **more):
    """Write a chain of (row, hash) blocks, each the child of the one before."""
    rows = [row for row, _ in text]
    parents = [0, *(h for _, h in text)]
    for (row, block_hash), parent in zip(text, parents, strict=False):
        if not engine.ledger.hash[row]:
            engine.ledger.hash[row], engine.ledger.parent[row] = block_hash, parent
    engine.write_blocks(rows, **more)


def fill_tree(engine):
    """Write two texts with a common shared beginning, and one text of which a block is also in host memory."""
    write_chain(engine, [(4, 104), (9, 109), (17, 117)], owner=1, state=BlockState.CACHED, ref_count=0)
    write_chain(engine, [(4, 104), (9, 109), (18, 118), (19, 119)], owner=2)
    engine.ledger.prefix_hits[[4, 9]] = 3
    engine.write_blocks([4, 9], owner=1, ref_count=2)
    write_chain(engine, [(30, 130)], owner=5, state=BlockState.CACHED, ref_count=0)
    write_chain(engine, [(66, 130)], owner=5, state=BlockState.CACHED, ref_count=0)
    engine.request(2, blocks=(4, 9, 18, 19))


def column(view, title):
    index = next(i for i, c in enumerate(COLUMNS) if c.title == title)
    return [view.model.index(row, index).data() for row in range(view.model.rowCount())]


def reply_with_texts(engine, session, poll, notes=None):
    """Reply to the questions for block texts. Returns the blocks that were asked for."""
    asked = [command for command in engine.source.sent if isinstance(command, GetBlockText)]
    engine.source.sent.clear()
    for command in asked:
        contents = tuple(
            BlockContent(block=b, token_ids=(1,), text=WORDS.get(b % 66 or 30, "?"), notes=(notes or {}).get(b, ()))
            for b in command.blocks
        )
        engine.source.replies.append(BlockText(contents=contents, tag=command.tag))
    poll(session)
    return [command.blocks for command in asked]


def wait_and_reply_with_texts(view, engine, session, poll, qtbot, notes=None):
    def has_asked_for_texts():
        return any(isinstance(command, GetBlockText) for command in engine.source.sent)

    qtbot.waitUntil(has_asked_for_texts)
    return reply_with_texts(engine, session, poll, notes)


def test_prefix_tree_has_one_row_per_text_until_texts_branch(view):
    assert column(view, "Prefix") == ["#1 · 32 tokens from the start", "#5 · 16 tokens from the start"]
    assert column(view, "Subtree blocks") == ["5", "1"]
    assert column(view, "Hits") == ["3", "–"]
    assert column(view, "Held by") == ["shared by 2", "idle"]
    assert column(view, "Where") == ["memory", "memory 1, host 1"]
    assert column(view, "Size") == ["720.0 KiB", "720.0 KiB"]
    view.table.selectRow(0)
    assert (view.model.has_children(0), view.model.has_children(1)) == (True, False)
    view.model.set_expanded(0, True)
    assert column(view, "Prefix")[:3] == [
        "#1 · 32 tokens from the start",
        "#2 · 32 tokens from 32",
        "#1 · 16 tokens from 32",
    ]
    assert [view.model.level_at(row) for row in range(4)] == [0, 1, 1, 0]
    assert view.count.text() == "3 texts, 6 blocks"


def test_adapter_and_salt_are_shown_before_the_text(view, engine, session, poll, qtbot, monkeypatch):
    monkeypatch.setitem(WORDS, 4, "You are a helpful assistant who answers questions")
    monkeypatch.setitem(WORDS, 30, "You are a helpful assistant who answers questions")
    notes = {30: (("LoRA", "sql"), ("Cache salt", "tenant b"))}
    wait_and_reply_with_texts(view, engine, session, poll, qtbot, notes)
    first, second = column(view, "Prefix")
    assert first.startswith("You are a helpful assistant")
    assert second == "LoRA sql, Cache salt tenant b · You are a helpful assistant who answers questions"
    view.search.setText("lora sql")
    assert column(view, "Prefix") == [second]


def test_prefix_table_columns_fit_next_to_the_scroll_bar(view, engine, session, poll, qtbot):
    for row in range(31, 61):
        write_chain(engine, [(row, 200 + row)], owner=6, state=BlockState.CACHED, ref_count=0)
    poll(session)
    view.resize(1300, 300)

    def has_bar():
        view.refresh()
        return view.table.verticalScrollBar().isVisible()

    qtbot.waitUntil(has_bar, timeout=20_000)
    assert view.table.horizontalHeader().length() <= view.table.viewport().width()


def test_prefix_model_passes_the_model_tester(view, qtmodeltester):
    qtmodeltester.check(view.model)
    view.model.set_all_expanded(True)
    qtmodeltester.check(view.model)


def test_arrow_keys_open_and_close_prefix_tree_nodes_and_move_the_selection(view, qtbot):
    view.table.setFocus()
    view.table.selectRow(0)
    for key, rows, current in (
        (Qt.Key.Key_Right, 4, 0),
        (Qt.Key.Key_Right, 4, 1),
        (Qt.Key.Key_Left, 4, 0),
        (Qt.Key.Key_Left, 2, 0),
        (Qt.Key.Key_Return, 4, 0),
        (Qt.Key.Key_Down, 4, 1),
    ):
        qtbot.keyClick(view.table, key)
        assert (view.model.rowCount(), view.table.currentIndex().row()) == (rows, current)


def test_click_on_the_branch_sign_opens_without_selecting(view, session, qtbot):
    at = view.table.visualRect(view.model.index(0, 0)).topLeft() + QPoint(9, 8)
    qtbot.mouseClick(view.table.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert view.model.rowCount() == 4
    assert session.selection.highlighted_rows is None


def test_selected_row_highlights_its_blocks_on_the_map(view, session, qtbot):
    page_map = PageMapView(session)
    qtbot.addWidget(page_map)
    page_map.resize(400, 300)
    page_map.show()
    page_map.refresh()
    view.table.selectRow(0)
    assert session.selection.highlighted_rows.tolist() == [4, 9]
    assert page_map.scene.cells.selected.tolist() == [4, 9]
    assert "shared by 2" in view.detail.facts.text()
    session.selection.select_request(2)
    assert session.selection.highlighted_rows is None
    assert page_map.scene.cells.selected.tolist() == [4, 9, 18, 19]


def test_prefix_tree_selects_and_opens_the_row_of_the_selected_request(view, session):
    session.selection.select_request(2)
    assert view.table.selected_rows() == [1]
    assert view.model.is_expanded(0)
    assert view.model.moment.tree.rows_of(view.model.node_at(1)).tolist() == [18, 19]
    assert session.selection.request == 2
    session.selection.select_request(None)
    assert view.table.selected_rows() == []


def test_prefix_tree_selects_the_last_cached_row_of_a_selected_finished_request(view, session):
    ledger = session.mirror.ledger
    assert session.mirror.requests.row_of(9) is None
    ledger.owner[[18, 19]], ledger.state[[18, 19]] = 9, BlockState.CACHED
    session.selection.select_request(9)
    assert view.model.moment.tree.rows_of(view.model.node_at(1)).tolist() == [18, 19]
    assert view.table.selected_rows() == [1]


def test_prefix_tree_selects_the_row_of_the_selected_block(view, session):
    session.selection.block = 66
    session.selection.changed.emit()
    assert view.table.selected_rows() == [1]
    assert "host 1" in view.detail.facts.text()


def test_selected_prefix_tree_node_stays_selected_as_the_tree_grows(view, engine, session, poll, qtbot):
    view.model.set_expanded(0, True)
    view.table.selectRow(2)
    assert session.selection.highlighted_rows.tolist() == [17]
    write_chain(engine, [(30, 130), (31, 131)], owner=5)
    write_chain(engine, [(4, 104), (9, 109), (17, 117), (20, 120), (21, 121)], owner=6)
    poll(session)
    view.refresh()
    qtbot.waitUntil(lambda: session.selection.highlighted_rows.tolist() == [17, 20, 21])
    assert view.table.selected_rows() == [view.model.row_of(view.model.moment.tree.node_of(17))]


def test_escape_clears_the_selection(view, session, qtbot):
    view.table.selectRow(0)
    qtbot.keyClick(view.table, Qt.Key.Key_Escape)
    assert session.selection.highlighted_rows is None
    assert view.table.selected_rows() == []
    assert not view.detail.isVisible()


def test_block_texts_are_requested_only_for_visible_prefix_tree_rows(view, engine, session, poll, qtbot):
    assert wait_and_reply_with_texts(view, engine, session, poll, qtbot) == [(4, 9, 30)]
    assert column(view, "Prefix") == ["You are a helpful", "Once upon"]
    view.model.set_expanded(0, True)
    wait_and_reply_with_texts(view, engine, session, poll, qtbot)
    assert column(view, "Prefix")[1:3] == ["cook. Stir", "poet. Sing"]
    view.table.selectRow(0)
    assert view.detail.text.toPlainText() == "You are a helpful"
    view.search.setText("POET")
    assert column(view, "Prefix") == ["You are a helpful", "poet. Sing"]
    assert view.count.text() == "1 of 4 rows"


def test_prefix_texts_that_begin_alike_are_shortened_to_where_they_differ(
    view, engine, session, poll, qtbot, monkeypatch
):
    alike = "You are a helpful assistant of a "
    monkeypatch.setitem(WORDS, 18, f"{alike}bakery")
    monkeypatch.setitem(WORDS, 17, f"{alike}bookshop")
    view.model.set_expanded(0, True)
    qtbot.waitUntil(lambda: any(isinstance(c, GetBlockText) and 17 in c.blocks for c in engine.source.sent))
    reply_with_texts(engine, session, poll)
    assert column(view, "Prefix")[1:3] == ["…of a bakery Stir", "…of a bookshop"]
    tip = view.model.index(2, 0).data(Qt.ItemDataRole.ToolTipRole)
    assert tip == f"{alike}bookshop"


def test_text_of_a_replaced_block_is_not_shown(view, engine, session, poll, qtbot):
    qtbot.waitUntil(lambda: any(isinstance(command, GetBlockText) for command in engine.source.sent))
    engine.ledger.hash[30] = 999
    engine.write_blocks([30], owner=9)
    poll(session)
    reply_with_texts(engine, session, poll)
    known, other = column(view, "Prefix")
    assert (known, other[2:]) == ("You are a helpful", " · 16 tokens from the start")


def test_viewer_does_not_request_texts(view, engine, session, poll, qtbot):
    session.status = replace(session.status, role=Role.VIEWER)
    session.texts.request(view, [BlockTextLookup(7, 18, 0, 0, 118)])
    session.texts.poll()
    assert engine.source.sent == []
    view.refresh()
    assert view.note.text() == FOR_OPERATORS


@pytest.mark.parametrize(
    ("which", "num_rows"),
    [
        (PrefixFilter.ALL, 4),
        (PrefixFilter.SHARED, 1),
        (PrefixFilter.HELD, 2),
        (PrefixFilter.IDLE, 3),
        (PrefixFilter.HIT, 1),
        (PrefixFilter.LOWER, 1),
        (PrefixFilter.CUT, 0),
    ],
)
def test_prefix_filter_shows_matching_rows_and_their_ancestors(view, which, num_rows):
    view.model.set_all_expanded(True)
    view.filter_box.setCurrentText(which.value)
    assert view.model.rowCount() == num_rows


@pytest.mark.parametrize(
    ("words", "num_rows"), [("#2", 2), ("#77", 0), ("19", 2), ("66", 1), ("nowhere", 0), ("#x", 0)]
)
def test_prefix_search_finds_rows_of_a_request_or_block_number(view, words, num_rows):
    view.model.set_all_expanded(True)
    view.search.setText(words)
    assert view.model.rowCount() == num_rows


def test_sorting_the_prefix_tree_keeps_siblings_below_their_parent(view):
    view.model.set_all_expanded(True)
    for index in range(len(COLUMNS)):
        for order in (Qt.SortOrder.AscendingOrder, Qt.SortOrder.DescendingOrder):
            view.table.sortByColumn(index, order)
            levels = [view.model.level_at(row) for row in range(4)]
            assert levels in ([0, 1, 1, 0], [0, 0, 1, 1])


def test_prefix_rows_are_copied_as_tab_separated_text(view, qtbot):
    view.model.set_all_expanded(True)
    view.table.selectAll()
    qtbot.keyClick(view.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    lines = [line.split("\t") for line in QGuiApplication.clipboard().text().splitlines()]
    assert lines[0] == [c.title for c in COLUMNS]
    assert lines[1][:5] == ["#1 · 32 tokens from the start", "5", "2", "32", "3"]
    assert lines[2][0] == "  #2 · 32 tokens from 32"
    assert {len(line) for line in lines} == {len(COLUMNS)}


def test_prefix_row_whose_beginning_was_evicted_is_marked(view, engine, session, poll, qtbot):
    engine.ledger.hash[[4, 9]], engine.ledger.parent[[4, 9]] = 0, 0
    engine.write_blocks([4, 9], filled=0, ref_count=0, state=BlockState.FREE, owner=-1)
    poll(session)
    view.refresh()
    qtbot.waitUntil(lambda: "lost its beginning" in column(view, "Prefix"))
    view.filter_box.setCurrentText(PrefixFilter.CUT.value)
    assert view.model.rowCount() == 1
    view.model.set_all_expanded(True)
    view.table.selectRow(0)
    assert "3 blocks below" in view.detail.facts.text()
    assert session.selection.highlighted_rows.size == 0


def test_prefix_view_shows_one_of_several_kv_groups_and_can_switch(engine, make_session, qtbot):
    write_chain(engine, [(4, 104), (9, 109)], owner=1)
    write_chain(engine, [(20, 104)], owner=1)
    cache = msgspec.structs.replace(
        engine.hello.cache, groups=(KVGroup(kind="window", window=64, block_size=32), KVGroup(kind="full"))
    )
    engine.ledger.group[[4, 9]] = 1
    engine.ledger.group[20] = 0
    engine.hello = msgspec.structs.replace(engine.hello, cache=cache)
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    made = PrefixesView(make_session(engine))
    qtbot.addWidget(made)
    made.apply_theme(THEMES["light"])
    made.show()
    made.refresh()
    assert made.group.currentText() == "1: full attention"
    assert column(made, "Tokens") == ["32"]
    size = engine.hello.cache.block_size
    assert made.note.text().startswith(
        f"{SEVERAL_GROUPS}. A reusable prefix has at least 32 tokens, because blocks of {size} and 32 tokens first end"
        " at the same position there."
    )
    made.group.setCurrentIndex(0)
    qtbot.waitUntil(lambda: column(made, "Blocks") == ["1"])
    assert column(made, "Tokens") == ["32"]
    made.shut_down()


def test_note_states_the_shortest_reusable_prefix_within_a_block(engine, make_session, qtbot):
    write_chain(engine, [(4, 104)], owner=1)
    groups = (KVGroup(kind="state", block_size=64), KVGroup(kind="full"))
    cache = msgspec.structs.replace(engine.hello.cache, groups=groups, hit_tokens=16)
    engine.hello = msgspec.structs.replace(engine.hello, cache=cache)
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    made = PrefixesView(make_session(engine))
    qtbot.addWidget(made)
    made.apply_theme(THEMES["light"])
    made.show()
    made.refresh()
    assert made.note.text().startswith(f"{SEVERAL_GROUPS}. A reusable prefix has at least 16 tokens.")
    made.shut_down()


@pytest.mark.parametrize(
    ("caching", "parents", "words"), [(False, True, NO_CACHE), (True, False, NO_PARENTS), (True, True, NOTHING_YET)]
)
def test_empty_view_explains_why_there_is_no_tree(engine, make_session, qtbot, caching, parents, words):
    update = engine.source.updates.popleft()
    cache = msgspec.structs.replace(engine.hello.cache, prefix_caching=caching, has_parents=parents)
    hello = msgspec.structs.replace(engine.hello, cache=cache)
    engine.source.updates.append(type(update)(snapshot=msgspec.structs.replace(update.snapshot, hello=hello)))
    made = PrefixesView(make_session(engine))
    qtbot.addWidget(made)
    made.apply_theme(THEMES["light"])
    made.show()
    made.refresh()
    assert made.empty_label.isVisible()
    assert words in driver.visible_texts(made)


def test_large_prefix_tree_is_built_in_the_background(engine, session, poll, qtbot, monkeypatch):
    monkeypatch.setattr(tree_builder, "MAX_SYNC_ROWS", 0)
    fill_tree(engine)
    poll(session)
    made = PrefixesView(session)
    qtbot.addWidget(made)
    made.show()
    made.refresh()
    assert made.model.rowCount() == 0
    qtbot.waitUntil(lambda: made.model.rowCount() == 2)
    write_chain(engine, [(40, 140)], owner=5)
    poll(session)
    made.refresh()
    qtbot.waitUntil(lambda: made.model.rowCount() == 3)
    assert made.builder.is_loaded
    made.shut_down()


def test_prefix_tree_that_cannot_be_built_is_reported_and_built_again(engine, session, poll, qtbot, monkeypatch):
    def broken(blocks):
        raise MemoryError("for a tree")

    monkeypatch.setattr(tree_builder, "MAX_SYNC_ROWS", 0)
    monkeypatch.setattr(tree_builder, "_RETRY_S", 0.0)
    monkeypatch.setattr(tree_builder, "build", broken)
    fill_tree(engine)
    poll(session)
    made = PrefixesView(session)
    qtbot.addWidget(made)
    made.show()
    made.refresh()
    qtbot.waitUntil(lambda: made.empty_label.text() == "The tree could not be built: MemoryError: for a tree")
    monkeypatch.undo()
    monkeypatch.setattr(tree_builder, "MAX_SYNC_ROWS", 0)
    qtbot.waitUntil(lambda: made.model.rowCount() == 2)
    assert made.builder.failure == ""
    made.shut_down()


def test_prefix_tree_shows_how_long_a_prefix_has_been_idle(view, engine, session, poll, qtbot):
    now_ns = view.model.moment.now_ns
    moment = view.model.moment
    row, held = (next(r for r in range(2) if column(view, "Held by")[r] == words) for words in ("idle", "shared by 2"))
    moment.used_ns[view.model.node_at(row)] = now_ns - 12 * SECOND_NS
    assert column(view, "Idle")[row] == "12 s"
    for seconds, words in ((60, "1 min"), (75, "1 min 15 s"), (700, "11 min"), (7500, "2 h 5 min"), (0, "now")):
        moment.used_ns[view.model.node_at(row)] = now_ns - seconds * SECOND_NS
        assert column(view, "Idle")[row] == words
    moment.used_ns[view.model.node_at(row)] = UNKNOWN
    moment.first_ns = now_ns - 30 * SECOND_NS
    assert column(view, "Idle")[row] == "over 30 s"
    moment.used_ns[view.model.node_at(held)] = now_ns - 12 * SECOND_NS
    assert column(view, "Idle")[held] == "now"


def test_time_of_a_step_is_interpolated_between_two_recorded_seconds(session):
    overview, mirror = SessionOverview(), session.mirror
    mirror.step, mirror.time_ns = 100, 10 * SECOND_NS + 1
    seconds = [Summary(time_ns=at * SECOND_NS, epoch=7, step=10 * at) for at in range(2, 9)]
    overview.extend([*seconds, Summary(time_ns=9 * SECOND_NS, epoch=8, step=3)])
    times = StepTimes(overview, mirror)
    assert times.times_of(np.array([20, 25, 100, 19])).tolist() == [
        3 * SECOND_NS,
        int(3.5 * SECOND_NS),
        times.times_of(np.array([100]))[0],
        UNKNOWN,
    ]
    assert times.first_ns == 3 * SECOND_NS
    assert StepTimes(SessionOverview(), mirror).times_of(np.array([99, 100])).tolist() == [UNKNOWN, 10 * SECOND_NS + 1]


def test_prefix_selection_returns_when_an_evicted_node_is_cached_again(view, engine, session, poll, qtbot):
    view.model.set_expanded(0, True)
    view.table.selectRow(2)
    assert session.selection.highlighted_rows.tolist() == [17]
    engine.ledger.hash[17], engine.ledger.parent[17] = 0, 0
    engine.write_blocks([17], filled=0, ref_count=0, state=BlockState.FREE, owner=-1)
    poll(session)
    view.refresh()
    qtbot.waitUntil(lambda: session.selection.highlighted_rows.size == 0)
    write_chain(engine, [(4, 104), (9, 109), (17, 117)], owner=3)
    poll(session)
    view.refresh()
    qtbot.waitUntil(lambda: session.selection.highlighted_rows.tolist() == [17])
    assert view.model.is_expanded(0)


def test_prefix_filter_and_order_are_saved_and_restored(view, session, settings, qtbot):
    view.filter_box.setCurrentText(PrefixFilter.IDLE.value)
    view.table.sortByColumn(next(i for i, c in enumerate(COLUMNS) if c.title == "Hits"), Qt.SortOrder.AscendingOrder)
    view.save_settings(settings)
    other = PrefixesView(session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    header = other.table.horizontalHeader()
    assert other.model.node_filter is PrefixFilter.IDLE
    assert COLUMNS[header.sortIndicatorSection()].title == "Hits"
    assert header.sortIndicatorOrder() == Qt.SortOrder.AscendingOrder
    settings.setValue(PREFIX_ORDER, "Nonsense sideways")
    other.restore_settings(settings)
    other.shut_down()


def test_prefix_tree_is_frozen_while_the_window_is_paused(view, engine, session, poll, qtbot):
    session.timeline.pause()
    write_chain(engine, [(40, 140)], owner=5)
    poll(session)
    view.refresh()
    assert view.model.rowCount() == 2
    session.timeline.go_live()
    view.refresh()
    qtbot.waitUntil(lambda: view.model.rowCount() == 3)


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), [(300, 600), (1400, 220)])
def test_prefixes_view_is_painted_at_narrow_and_low_sizes(view, theme, width, height):
    view.apply_theme(THEMES[theme])
    view.model.set_all_expanded(True)
    view.table.selectRow(1)
    view.resize(width, height)
    assert view.grab().width() == width


def test_seek_to_a_time_with_a_small_prefix_tree_drops_the_selected_node(make_window, qtbot):
    """The tree has two dozen nodes in the middle of the recording and none at its start.

    The node of the block clicked on the map does not exist at the start, and nothing must raise (pytest-qt would fail
    the test).
    """
    session = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
    try:
        window = make_window(session, with_views=("prefixes",), size=(1400, 900))
        session.start()
        window.focus_view("prefixes")
        view, canvas = window.views["prefixes"], window.page_map.canvas
        qtbot.waitUntil(lambda: session.is_overview_complete and canvas.isVisible())
        begin_ns, end_ns = session.timeline.range_ns

        def is_small():
            moment = view.model.moment
            return moment is not None and len(moment.tree) < 8 and view.is_loaded

        num_deep = 0
        for share in (0.42, 0.36, 0.3):
            session.timeline.go_to(begin_ns + round((end_ns - begin_ns) * share))
            qtbot.waitUntil(lambda: view.model.moment is not None and len(view.model.moment.tree) > 12)
            qtbot.waitUntil(lambda: view.is_loaded)
            moment = view.model.moment
            deep = [node for node in range(len(moment.tree)) if moment.tree.rows_of(node).size]
            on_device = (int(moment.tree.rows_of(node)[0]) for node in reversed(deep))
            block = next(row for row in on_device if row < session.mirror.hello.cache.num_blocks)
            qtbot.mouseClick(canvas, Qt.MouseButton.LeftButton, pos=canvas.cell_rect(block).center())
            assert session.selection.block == block
            qtbot.waitUntil(lambda: view.table.selected_rows() != [])
            num_deep += view.selection.current >= 8
            qtbot.keyClick(canvas, Qt.Key.Key_Home)
            qtbot.waitUntil(is_small)
            current = view.selection.current
            assert current is None or current < len(view.model.moment.tree)
            canvas.setFocus()
        assert num_deep, "at least one of the clicked blocks must be deep in the tree"
    finally:
        session.close()


@pytest.mark.parametrize("width", [520, 700, 820, 1100, 1600])
def test_prefix_table_columns_fill_the_width_of_the_table(view, width):
    view.resize(width, 500)
    columns, room = range(len(COLUMNS)), view.table.viewport().width()
    ends = [view.table.columnViewportPosition(column) + view.table.columnWidth(column) for column in columns]
    assert any(0 <= room - end < 24 for end in ends), (ends, room)
