"""Tests of what the console shows of the KV cache: strips of blocks, prefix marks, comparison of versions."""

from __future__ import annotations

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from tests.app.conftest import poll_all

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.cache_strip import CacheStrip
from kvscope_app.views.console.conversation import AnswerStats, Message
from kvscope_app.views.console.prefix_break import TurnRequest, find_break
from kvscope_app.views.console.turn_blocks import TurnBlocks, TurnBlockState
from kvscope_app.views.inspector.inspector_view import InspectorView
from kvscope_app.views.page_map.color_modes import OWNER
from kvscope_app.views.page_map.comparison_mode import IN_BOTH, ONLY_FIRST, ONLY_SECOND, OTHER
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Accepted
from kvscope_telemetry.messages.telemetry import EventData

RUNNING, FINISHED = 1, 3
STATES = TurnBlockState


def write_text(engine, rows, hashes, owner, parent=0, **more):
    """Write full blocks of one text, whose first block follows the block with hash `parent`."""
    engine.ledger.hash[rows] = hashes
    engine.ledger.parent[rows] = [parent, *hashes[:-1]]
    engine.write_blocks(rows, owner=owner, **more)


def end_request(engine, number, rows, num_tokens, num_cached_tokens=0):
    """End a request, which leaves its blocks in the cache."""
    engine.request(
        number,
        (),
        state=FINISHED,
        num_prompt_tokens=num_tokens,
        num_output_tokens=0,
        num_cached_tokens=num_cached_tokens,
    )
    engine.write_blocks(rows, owner=number, state=BlockState.CACHED, ref_count=0)


def evict(engine, rows):
    engine.ledger.hash[rows] = 0
    engine.ledger.parent[rows] = 0
    engine.write_blocks(rows, owner=-1, state=BlockState.FREE, ref_count=0, filled=0)


def refresh(console):
    """Apply all published updates, and let the console show them."""
    poll_all(console.session)
    console.page.turn_cache.refresh()


def answer_turn(console, prompt, number, rows, hashes, num_cached_tokens=0, parent=0, start=0):
    """Ask `prompt`. The engine computes blocks `rows[start:]` for it, and caches all of `rows` when it ends."""
    engine = console.engine
    console.ask(prompt)
    console.reply(Accepted(request_id=console.request_id, numbers=(number,), num_prompt_tokens=16 * len(rows) - 3))
    write_text(engine, rows[start:], hashes[start:], number, hashes[start - 1] if start else parent)
    more = {"num_prompt_tokens": 16 * len(rows), "num_output_tokens": 0, "num_cached_tokens": num_cached_tokens}
    engine.request(number, rows, state=RUNNING, **more)
    refresh(console)
    console.token(f"answer {number}")
    end_request(engine, number, rows[start:], 16 * len(rows), num_cached_tokens)
    console.finish()
    refresh(console)


@pytest.fixture
def two_turns(console):
    """Console with two turns: blocks 2, 3 and then 4, with hashes 11, 12 and 13."""
    answer_turn(console, "one", 1, [2, 3], [11, 12])
    answer_turn(console, "two", 2, [2, 3, 4], [11, 12, 13], num_cached_tokens=32, start=2)
    return console


def panels(console):
    return [card.cache for card in console.page.transcript.cards[1::2]]


def summaries(console):
    return [panel.summary.text() for panel in panels(console)]


def test_strips_show_reused_cached_and_evicted_blocks(two_turns):
    assert summaries(two_turns) == ["2 blocks, 0 reused  ·  2 cached", "3 blocks, 2 reused  ·  3 cached"]
    evict(two_turns.engine, [3])
    refresh(two_turns)
    assert summaries(two_turns)[1] == "3 blocks, 2 reused  ·  2 cached, 1 evicted"
    strip = panels(two_turns)[1].strip
    assert strip.accessibleName().endswith("1 evicted")
    assert strip.tip_at(2).startswith("Block 3 of 3, tokens 32 to 47: computed; now cached")
    assert "reused, also in the previous turn; now evicted" in strip.tip_at(1)


def test_request_that_ended_between_two_refreshes_is_found_by_its_parent_hashes(console):
    console.ask("one")
    console.accept(1)
    write_text(console.engine, [5, 6, 7], [21, 22, 23], owner=1)
    console.engine.request(1, [5, 6, 7], num_prompt_tokens=48, num_output_tokens=0)
    end_request(console.engine, 1, [5, 6, 7], 48)
    console.finish()
    refresh(console)
    evict(console.engine, [7])
    refresh(console)
    assert summaries(console) == ["3 blocks, 0 reused  ·  2 cached, 1 evicted"]


def test_chat_says_once_that_blocks_are_unknown_after_a_restart_of_the_engine(two_turns):
    two_turns.engine.restart(epoch=8)
    refresh(two_turns)
    assert summaries(two_turns) == ["", "Blocks are unknown: the engine was restarted since"]
    assert panels(two_turns)[0].strip.isHidden()


def test_strips_are_known_after_a_restart_of_the_desktop_until_the_engine_restarts(
    two_turns, make_console, make_session
):
    evict(two_turns.engine, [3])
    two_turns.view.shut_down()
    two_turns.engine.restart(epoch=7)  # the same run of the engine, which no longer reports ended requests
    console = make_console(make_session(two_turns.engine))
    refresh(console)
    assert summaries(console) == [
        "2 blocks, 0 reused  ·  1 cached, 1 evicted",
        "3 blocks, 0 reused  ·  2 cached, 1 evicted",
    ]
    assert "also in the previous turn; now evicted" in panels(console)[1].strip.tip_at(1)
    stored = [message.block_hashes for message in console.page.current.messages if message.block_hashes is not None]
    assert [len(hashes.own) for hashes in stored] == [2 * 8, 1 * 8], "the blocks of the first turn are stored once"
    console.engine.restart(epoch=8)
    refresh(console)
    assert summaries(console)[1] == "Blocks are unknown: the engine was restarted since"


def test_click_on_a_strip_selects_the_turns_own_blocks(two_turns, qtbot):
    strip, selection = panels(two_turns)[1].strip, two_turns.session.selection
    x = next(x for x in range(strip.width()) if strip.block_at(x) == 2)
    qtbot.mouseClick(strip, Qt.MouseButton.LeftButton, pos=QPoint(x, 3))
    assert selection.highlighted_rows.tolist() == [4]
    assert selection.block == 4


def test_arrow_keys_and_enter_choose_a_block_of_the_strip(two_turns, qtbot):
    strip = panels(two_turns)[1].strip
    for key in (Qt.Key.Key_End, Qt.Key.Key_Left, Qt.Key.Key_Return):
        qtbot.keyClick(strip, key)
    assert strip.accessibleDescription().startswith("Block 2 of 3")
    assert two_turns.session.selection.block == 3


def test_single_evicted_block_stays_visible_among_thousands(qtbot):
    strip = CacheStrip()
    qtbot.addWidget(strip)
    strip.apply_theme(THEMES["dark"])
    states = np.full(5000, STATES.CACHED, np.uint8)
    states[1234] = STATES.EVICTED
    strip.show_blocks(TurnBlocks(states, np.arange(5000), 16, num_reused=100, num_earlier=0))
    strip.resize(400, 14)
    image = strip.grab().toImage()
    row = {image.pixelColor(x, 4).name() for x in range(image.width())}
    assert {THEMES["dark"].flash_evicted, THEMES["dark"].block_cached} <= row


def test_inspector_names_the_turn_of_a_block_and_leads_back_to_it(two_turns, session, qtbot):
    inspector = InspectorView(session)
    qtbot.addWidget(inspector)
    two_turns.page.new_conversation()
    session.selection.select_block(3)
    inspector.refresh()
    model = inspector.table.model()
    texts = [model.index(row, 1).data() for row in range(model.rowCount())]
    row = texts.index("turn 1 of “one”")
    inspector.table.activated.emit(model.index(row, 1))
    assert two_turns.texts[0] == "one"


def test_comparison_of_versions_paints_shared_and_separate_blocks(console, session, qtbot):
    page_map = PageMapView(session)
    qtbot.addWidget(page_map)
    page_map.refresh()
    page_map.set_mode(OWNER)
    answer_turn(console, "one", 1, [2, 3], [11, 12])
    console.page.transcript.cards[0].redo.click()
    answer_turn(console, "uno", 2, [2, 5], [11, 15], num_cached_tokens=16, start=1)
    write_text(console.engine, [9], [99], owner=3)
    refresh(console)
    compare = console.page.transcript.cards[0].versions.compare
    compare.click()
    assert compare.isChecked()
    page_map.refresh()
    cells = page_map.scene.cells
    keys = dict(zip([2, 3, 5, 9], (cells.ranks_of(np.array([2, 3, 5, 9], np.uint32)) & 255).tolist(), strict=True))
    assert keys == {2: IN_BOTH, 3: ONLY_SECOND, 5: ONLY_FIRST, 9: OTHER}
    assert "only version 2: 1 block, only version 1: 1 block" in page_map.legend.accessibleName()
    session.selection.clear()  # Esc
    assert not compare.isChecked()
    assert page_map.scene.mode is OWNER
    compare.click()
    page_map.set_mode(OWNER)
    assert (compare.isChecked(), page_map.scene.mode) == (False, OWNER)


def test_versions_whose_blocks_are_unknown_are_not_compared(console, session):
    console.ask("one", "first")
    console.page.transcript.cards[1].redo.click()
    console.token("second")
    console.finish()
    console.card.versions.compare.click()
    assert not console.card.versions.compare.isChecked()
    assert session.selection.comparison is None
    assert "unknown" in console.page.notice.text()


def test_edited_prompt_is_marked_where_it_differs_from_the_earlier_version(console):
    answer_turn(console, "Name a river 🌊 in France", 1, [2, 3], [11, 12])
    console.page.transcript.cards[0].redo.click()
    answer_turn(console, "Name a river 🌊 in Germany", 2, [2, 5], [11, 15], num_cached_tokens=16, start=1)
    prompt = console.page.transcript.cards[0]
    assert not prompt.prefix_mark.isHidden(), [c.prefix_mark.text() for c in console.page.transcript.cards]
    assert "edited prompt" in prompt.prefix_mark.text()
    (mark,) = prompt.body.extraSelections()
    assert mark.cursor.selectedText() == "Germany"


@pytest.mark.parametrize(
    ("turn", "previous", "expected"),
    [
        ({}, None, "First turn: nothing was cached"),
        ({"cached": 96}, {}, None),
        (
            {"cached": 32, "miss": EventData(kind="started", missed="evicted", missed_token=32, missed_step=9)},
            {},
            "evicted at step 9",
        ),
        ({"cached": 32, "hashes": (1, 2, 3, 4, 5, 6)}, {}, "the next block was no longer cached"),
        ({"cached": 0, "hashes": (7, 8, 9), "system": "b"}, {}, "the system prompt was changed"),
        ({"cached": 0, "hashes": (7, 8, 9), "system": ""}, {}, "the tokens differ from those of the previous turn"),
        (
            {
                "cached": 64,
                "miss": EventData(kind="started", missed="differs", missed_token=75),
                "hashes": (1, 2, 3, 4, 9, 9),
            },
            {},
            "token 75: the previous answer was tokenised differently, since it was sent as text",
        ),
        ({"cached": 32, "adapter": "sql"}, {}, "another LoRA adapter was chosen"),
        ({"cached": 0}, {"epoch": 1}, "Prefix not found: the engine was restarted"),
        ({"cached": 96}, {"epoch": 1}, None),
        ({"cached": 32}, {"hashes": None}, None),
    ],
)
def test_reason_of_a_broken_prefix_is_the_known_one_or_none(turn, previous, expected):
    prompt = Message(role="user", content="next")
    request = turn_request(**{"hashes": None, **turn}, num_prompt_tokens=130)
    before = None if previous is None else turn_request(**{"hashes": (1, 2, 3, 4, 5, 6), **previous})
    found = find_break(request, before, 16, prompt)
    assert (found is None) == (expected is None)
    if found is not None:
        assert expected in found.text


def turn_request(cached=0, hashes=None, miss=None, num_prompt_tokens=70, **stats):
    stats = {"epoch": 7, "system": "a"} | stats
    answer = Message(
        role="assistant", content="text", stats=AnswerStats(num_prompt_tokens=num_prompt_tokens, num_tokens=30, **stats)
    )
    return TurnRequest(answer, cached, None if hashes is None else np.array(hashes, np.uint64), miss)
