"""Tests of a window on a newer engine: unknown states and fields are shown as unknown."""

from __future__ import annotations

from tests.app.window_driver import poll_until, status_label

from kvscope_app.ui.theme import DARK
from kvscope_app.views.block_locations import locate_block
from kvscope_app.views.console.chat_answer import ChatAnswer
from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.page_map.color_modes import COLOR_MODES, FREE, STATE, UNKNOWN
from kvscope_app.views.page_map.legend_items import shown_in
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Usage
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.source import SourceState, SourceStatus


def test_blocks_in_an_unknown_state_or_tier_are_drawn_as_unknown(engine, session, poll, make_window):
    engine.write_blocks([3], state=BlockState.UNKNOWN)
    engine.ledger.tier[4] = Tier.UNKNOWN
    engine.write_blocks([4])
    poll(session)
    ledger = session.mirror.ledger
    assert STATE.keys(ledger, slice(2, 5), 16, 1).tolist() == [FREE, UNKNOWN, UNKNOWN]
    assert STATE.key_colors(DARK)[UNKNOWN] == DARK.muted
    for mode in COLOR_MODES:
        assert mode.keys(ledger, slice(2, 5), 16, 1)[1] != FREE
    facts = block_facts(session.mirror, 3, 16)
    assert (facts.state, facts.color) == ("unknown", "muted")
    assert ("In", "an unknown tier") in block_facts(session.mirror, 4, 16).rows
    assert "unknown" in [swatch.label for swatch in STATE.legend(DARK, shown_in(session.mirror, ()))]
    assert session.mirror.count(BlockState.UNKNOWN) == session.mirror.count(BlockState.ACTIVE, Tier.UNKNOWN) == 1
    window = make_window(session)
    assert window.page_map.canvas.grab().toImage().width() > 0
    assert locate_block(engine.hello.cache, 70).name == "Place 6"


def test_request_in_an_unknown_state_is_listed_as_unknown(engine, session, poll, make_window):
    engine.request(1, [1, 2], state=RequestState.UNKNOWN)
    poll(session)
    window = make_window(session, with_views=("requests",))
    window.views["requests"].refresh()
    model = window.views["requests"].model
    cells = [model.data(model.index(0, column)) for column in range(model.columnCount())]
    assert "unknown" in cells


def test_status_bar_counts_skipped_and_unknown_data(engine, session, make_window, qtbot):
    window = make_window(session)
    label = status_label(window, "frames")
    assert "newer" not in label.toolTip()
    engine.source.status = SourceStatus(SourceState.LIVE, frames_received=9, num_skipped=345, num_unknown=2)
    poll_until(session, lambda: session.status == engine.source.status, qtbot)
    assert "only a newer kvscope knows: 345" in label.toolTip()
    assert "shown as unknown, because only a newer kvscope knows them: 2" in label.toolTip()
    assert "unreadable" not in label.text()


def test_answer_with_an_unknown_finish_reason_is_shown_as_stopped_with_the_reason():
    message = Message(role="assistant")
    answer = ChatAnswer("r", Conversation(key="k"), message, 1)
    answer.set_finished(Finished(request_id="r", finish_reason="quota", usage=Usage(), timing=RequestTiming()))
    assert answer.is_ended
    assert (message.ending, message.note) == ("stopped", "the engine says 'quota'")
