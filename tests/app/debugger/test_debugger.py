"""The debugger in the window: who may do what, the answers, the bar while the engine is held, menus and the sheet."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QContextMenuEvent
from PySide6.QtWidgets import QApplication, QMenu, QMessageBox

from kvscope_app.debugger.debug_actions import DEBUG, OF_BLOCK, OF_REQUEST, LimitsDialog
from kvscope_app.debugger.selection_menus import add_to_requests
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import Abort, Control, Done, Evict, Failed, Pin, Preempt, SetLimits, Unpin
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.source import SourceState, SourceStatus, Update


def be(engine, session, state=SourceState.LIVE, reason="", role="operator", intervenes=True):
    """The source is like this; 250 ms went by."""
    engine.source.status = SourceStatus(state, reason, role=role, intervenes=intervenes)
    session._status_told_ns = 0
    session.poll()


def answer(engine, session, kind=Done, **fields):
    """The engine answers what it was told last."""
    sent = [command for command in engine.source.sent if getattr(command, "tag", 0) >= 1 << 30]
    asked = [command for command in sent if command.tag < 1 << 40]
    engine.source.replies.append(kind(tag=asked[-1].tag, **fields))
    session.poll()


def beat(engine, poll, session, **fields):
    heartbeat = Heartbeat(epoch=engine.epoch, time_ns=1, seq=engine.seq, step=engine.step, **fields)
    engine.source.updates.append(Update(heartbeat=heartbeat))
    poll(session)


def pack(*blocks):
    return np.array(blocks, "<u4").tobytes()


@pytest.fixture
def window(engine, session, make_window, poll):
    """Request 3 runs on blocks 4 and 5; 8 and 9 are cached."""
    window = make_window(session)
    engine.ledger.hash[[4, 8, 9]] = (1, 2, 3)
    engine.hold([4, 5], owner=3)
    engine.hold([8, 9], owner=2, state=BlockState.CACHED, ref_count=0)
    engine.request(3, blocks=(4, 5))
    poll(session)
    be(engine, session)
    return window


def choose(window, block):
    window.page_map.canvas.cursor_block = block
    window.session.status_changed.emit()


def test_a_viewer_reads_why_it_may_do_nothing(engine, session, window):
    be(engine, session, role="viewer")
    for spec in window.actions_by_name.in_group(DEBUG):
        action = window.actions_by_name[spec.name]
        assert not action.isEnabled()
        assert "viewer" in action.toolTip()


def test_an_engine_that_does_not_know_how_can_still_be_paused(engine, session, window):
    be(engine, session, intervenes=False)
    actions = window.actions_by_name
    assert actions["pause_engine"].isEnabled()
    assert not actions["step"].isEnabled()
    assert not actions["limits"].isEnabled()
    assert "not reported support" in actions["limits"].toolTip()


def test_steps_are_for_an_engine_that_is_paused(engine, session, window):
    step = window.actions_by_name["step"]
    assert not step.isEnabled()
    assert "pause it first" in step.toolTip()
    window.actions_by_name["pause_engine"].trigger()
    answer(engine, session)
    be(engine, session, SourceState.PAUSED, "by ann")
    assert step.isEnabled()
    window.actions_by_name["step_more"].trigger()
    command = engine.source.sent[-1]
    assert isinstance(command, Control)
    assert (command.action, command.num_steps) == ("step", 10)


def test_what_has_nothing_to_do_is_not_offered(engine, session, window, poll):
    actions = window.actions_by_name
    resume, unpin = actions["resume"], [actions["unpin_all"], actions["unpin_anyones"]]
    assert not resume.isEnabled()
    assert "not paused" in resume.toolTip()
    assert not any(action.isEnabled() for action in unpin)
    assert unpin[0].toolTip() == "No block is pinned"
    actions["pause_engine"].trigger()
    answer(engine, session)
    assert resume.isEnabled()  # its sign that it stands comes later
    actions["resume"].trigger()
    answer(engine, session)
    assert not resume.isEnabled()
    be(engine, session, SourceState.PAUSED, "by ann")
    assert resume.isEnabled()
    beat(engine, poll, session, pinned=pack(8), pinned_by="ann")
    session.status_changed.emit()
    assert all(action.isEnabled() for action in unpin)


def test_the_bar_says_who_paused_the_engine_and_what_was_answered(engine, session, window):
    bar = window.paused_bar
    assert not bar.isVisible()
    be(engine, session, SourceState.PAUSED, "by ann")
    assert bar.isVisible()
    assert bar.paused_by.text() == "Paused by ann"
    window.actions_by_name["pause_engine"].trigger()
    answer(engine, session)
    be(engine, session, SourceState.PAUSED, "by ann, me")
    assert bar.paused_by.text() == "Paused by you"
    window.actions_by_name["resume"].trigger()
    answer(engine, session)
    be(engine, session)
    window.actions_by_name["pause_engine"].trigger()
    answer(engine, session)
    be(engine, session)  # what it says of itself comes a little later
    be(engine, session, SourceState.PAUSED, "by me")
    assert bar.paused_by.text() == "Paused by you"
    step = next(button for button in bar.buttons if button.text() == "Step")
    step.click()
    answer(engine, session, what="step 12 ran")
    assert bar.answer.text() == "Step 12 ran"
    be(engine, session)
    assert not bar.isVisible()


def test_a_viewer_sees_the_bar_and_cannot_press_its_buttons(engine, session, window):
    be(engine, session, SourceState.PAUSED, "by ann", role="viewer")
    assert window.paused_bar.isVisible()
    assert not any(button.isEnabled() for button in window.paused_bar.buttons)
    assert all("viewer" in button.toolTip() for button in window.paused_bar.buttons)


def test_the_selected_request_is_preempted_and_aborted_by_name(engine, session, window):
    actions = window.actions_by_name
    assert "No request is selected" in actions["preempt_swap"].toolTip()
    session.select_request(3)
    assert actions["preempt_recompute"].text() == "Preempt request #3 (recompute)"
    actions["preempt_recompute"].trigger()
    assert engine.source.sent[-1] == Preempt(number=3, how="recompute", tag=engine.source.sent[-1].tag)
    answer(engine, session, Failed, reason="request 3 cannot be swapped out: no lower tier")
    assert window.statusBar().currentMessage().lower().startswith("request 3 cannot be swapped out")
    actions["abort_request"].trigger()
    (question,) = window.findChildren(QMessageBox)
    assert "Abort request chat-3?" in question.text()
    session.select_request(None)
    next(button for button in question.buttons() if button.text().startswith("Abort")).click()
    assert engine.source.sent[-1] == Abort(request_id="chat-3", anyones=True)
    engine.source.replies.append(Done(request_id="chat-3"))
    session.poll()
    assert window.statusBar().currentMessage() == "Request #3 was aborted"


def test_what_waits_or_has_ended_cannot_be_preempted(engine, session, window, poll):
    engine.request(5, state=0)
    engine.request(6, state=3)
    poll(session)
    be(engine, session)
    session.select_request(5)
    assert "waiting" in window.actions_by_name["preempt_swap"].toolTip()
    assert window.actions_by_name["abort_request"].isEnabled()


@pytest.mark.parametrize(
    ("capabilities", "num_host", "refused"),
    [
        (OWN_ENGINE, 0, {"preempt_swap": "This engine has no lower tier to swap to"}),
        (OWN_ENGINE, 4, {}),
        (
            replace(OWN_ENGINE, engine="vllm"),
            4,
            {
                "preempt_swap": "vllm recomputes what it preempts: it cannot swap",
                "pin_block": "In vllm, blocks cannot be pinned",
                "pin_prefix": "In vllm, blocks cannot be pinned",
                "pin_request": "In vllm, blocks cannot be pinned",
                "limits": "In vllm, limits of a batch cannot be changed",
            },
        ),
    ],
)
def test_actions_that_the_engine_refuses_are_disabled_and_say_why(
    make_engine, make_session, make_window, poll, capabilities, num_host, refused
):
    engine = make_engine(capabilities=capabilities, num_host=num_host)
    session = make_session(engine)
    engine.ledger.hash[4] = 1
    engine.hold([4], owner=3)
    engine.request(3, blocks=(4,))
    poll(session)
    window = make_window(session)
    be(engine, session)
    session.select_request(3)
    choose(window, 4)
    names = ("preempt_swap", "preempt_recompute", "pin_block", "pin_prefix", "pin_request", "limits")
    disabled = {name: window.actions_by_name[name] for name in names if not window.actions_by_name[name].isEnabled()}
    assert {name: action.toolTip() for name, action in disabled.items()} == refused


def test_a_block_is_pinned_unpinned_and_evicted(engine, session, window, poll):
    actions = window.actions_by_name
    choose(window, 8)
    assert actions["evict_block"].text() == "Evict block 8 from the prefix cache"
    actions["pin_prefix"].trigger()
    assert engine.source.sent[-1] == Pin(blocks=(8,), with_prefix=True, tag=engine.source.sent[-1].tag)
    answer(engine, session, what="1 block is pinned until you disconnect")
    beat(engine, poll, session, pinned=pack(8), pinned_by="ann")
    be(engine, session)
    assert "pinned: unpin" in actions["evict_block"].toolTip()
    assert ("Pinned", "by ann: protected from eviction") in window.page_map.facts_of(8).rows
    actions["unpin_block"].trigger()
    assert engine.source.sent[-1] == Unpin(blocks=(8,), anyones=True, tag=engine.source.sent[-1].tag)
    beat(engine, poll, session)
    choose(window, 9)
    actions["evict_block"].trigger()
    assert engine.source.sent[-1] == Evict(blocks=(9,), tag=engine.source.sent[-1].tag)
    choose(window, 5)
    assert "not in the prefix cache" in actions["pin_block"].toolTip()
    assert "in use" in actions["evict_block"].toolTip()
    choose(window, -1)
    assert "No block is selected" in actions["pin_block"].toolTip()


def test_a_pin_that_would_leave_an_unfinished_request_too_few_blocks_is_disabled_and_says_why(
    engine, session, window, poll
):
    """The pool has 64 blocks of 16 slots."""
    actions = window.actions_by_name
    engine.ledger.parent[9] = 2  # the block before it in its text is 8
    engine.ledger.hash[20] = 4
    engine.frame([9, 20])
    engine.request(4, blocks=(20, 21), num_prompt_tokens=20, max_tokens=63 * 16 - 20)
    poll(session)
    be(engine, session)
    choose(window, 9)
    assert actions["pin_block"].isEnabled()
    assert not actions["pin_prefix"].isEnabled()
    reason = "Pinning these would leave 62 of 64 blocks to others, and request 4 may need 63"
    assert actions["pin_prefix"].toolTip() == reason
    session.select_request(2)
    assert actions["pin_request"].toolTip() == reason
    beat(engine, poll, session, pinned=pack(40))
    be(engine, session)
    choose(window, 9)
    assert actions["pin_block"].toolTip() == reason
    engine.request(4, state=RequestState.FINISHED)
    poll(session)
    be(engine, session)
    choose(window, 9)
    assert actions["pin_prefix"].isEnabled()


def test_a_pin_of_what_a_request_begins_with_or_may_begin_with_is_offered(engine, session, window, poll):
    """The engine counts such blocks as the request's own; of one that waits, the window does not know them."""
    actions = window.actions_by_name
    engine.request(6, blocks=(4, 5), max_tokens=64 * 16 - 20)
    poll(session)
    be(engine, session)
    choose(window, 4)
    assert actions["pin_block"].isEnabled()
    choose(window, 8)
    assert not actions["pin_block"].isEnabled()
    engine.request(6, state=RequestState.PREEMPTED, max_tokens=64 * 16 - 20)
    poll(session)
    be(engine, session)
    choose(window, 8)
    assert actions["pin_block"].isEnabled()


def test_what_a_request_wrote_is_pinned_and_evicted_together(engine, session, window):
    session.select_request(2)
    window.actions_by_name["evict_request"].trigger()
    assert engine.source.sent[-1].blocks == (8, 9)
    session.select_request(3)
    assert not window.actions_by_name["evict_request"].isEnabled()
    window.actions_by_name["pin_request"].trigger()
    assert engine.source.sent[-1].blocks == (4,)


def test_pinned_blocks_are_marked_on_the_map(engine, session, window, poll):
    canvas = window.page_map.canvas
    window.page_map.draw_all()
    before = canvas.grab().toImage()
    beat(engine, poll, session, pinned=pack(9), pinned_by="ann")
    window.page_map.draw_all()
    after = canvas.grab().toImage()
    rect = canvas.cell_rect(9)
    ratio = after.devicePixelRatio()
    marked = [
        QPoint(x, y)
        for x in range(after.width())
        for y in range(after.height())
        if before.pixel(x, y) != after.pixel(x, y)
    ]
    assert marked
    assert all(rect.adjusted(-1, -1, 1, 1).contains(QPoint(int(p.x() / ratio), int(p.y() / ratio))) for p in marked)


def test_the_past_is_not_acted_on(engine, session, window):
    choose(window, 8)
    session.select_request(3)
    session.timeline.pause()
    be(engine, session)
    for name in (*OF_BLOCK, *OF_REQUEST):
        assert "past" in window.actions_by_name[name].toolTip()
    assert window.actions_by_name["pause_engine"].isEnabled()


@pytest.mark.qt_log_ignore("grabbing the keyboard", extend=True)
def test_the_map_s_menu_is_about_the_block_under_the_pointer(engine, session, window, qtbot):
    canvas = window.page_map.canvas
    position = canvas.cell_rect(8).center()
    event = QContextMenuEvent(QContextMenuEvent.Reason.Mouse, position, canvas.mapToGlobal(position))
    QApplication.sendEvent(canvas, event)
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    texts = [action.text() for action in menu.actions()]
    assert "Pin block 8" in texts
    assert canvas.current_block == 8
    qtbot.keyClick(menu, Qt.Key.Key_Escape)


def test_the_request_table_s_menu_goes_on_with_ours(session, make_window):
    window = make_window(session, with_views=("requests",))
    assert window.actions_by_name["preempt_swap"] in window.views["requests"].table.actions()


def test_the_sheet_changes_the_limits_and_shows_the_answer(engine, session, window, poll):
    beat(engine, poll, session, max_num_seqs=8, max_num_batched_tokens=512)
    window.actions_by_name["limits"].trigger()
    sheet = next(w for w in QApplication.topLevelWidgets() if isinstance(w, LimitsDialog))
    assert sheet.fields["max_num_seqs"].value() == 8
    sheet.fields["max_num_seqs"].setValue(3)
    sheet.apply()
    command = engine.source.sent[-1]
    assert (type(command), command.max_num_seqs, command.max_num_batched_tokens) == (SetLimits, 3, 512)
    answer(engine, session, what="max_num_seqs is 3, max_num_batched_tokens 512")
    assert sheet.answer.text() == "max_num_seqs is 3, max_num_batched_tokens 512"
    sheet.apply()
    sheet.close()
    sheet.deleteLater()
    answer(engine, session, Failed, reason="too late for the sheet")
    assert window.statusBar().currentMessage().lower() == "too late for the sheet"


def test_the_request_table_offers_abort_once(session, window, qtbot):
    view = RequestsView(session)
    qtbot.addWidget(view)
    add_to_requests(view.table, window.actions_by_name)
    assert sum("bort" in action.text() for action in view.table.actions()) == 1
