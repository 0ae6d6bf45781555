"""Tests of the debugger: permissions, replies, the paused bar, context menus and the limits dialog."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QContextMenuEvent
from PySide6.QtWidgets import QApplication, QMenu, QMessageBox

from kvscope_app.debugger.debug_actions import BLOCK_ACTIONS, DEBUG, REQUEST_ACTIONS, LimitsDialog
from kvscope_app.debugger.selection_menus import add_to_requests
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import Abort, Control, Done, Evict, Failed, Pin, Preempt, SetLimits, Unpin
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.source import SourceState, SourceStatus, Update


def set_status(engine, session, state=SourceState.LIVE, reason="", role="operator", intervenes=True):
    """Set the source's status and poll the session."""
    engine.source.status = SourceStatus(state, reason, role=role, intervenes=intervenes)
    session._status_emitted_ns = 0
    session.poll()


def reply_to_last_command(engine, session, kind=Done, **fields):
    """Reply to the last command that was sent to the engine."""
    sent = [command for command in engine.source.sent if getattr(command, "tag", 0) >= 1 << 30]
    asked = [command for command in sent if command.tag < 1 << 40]
    engine.source.replies.append(kind(tag=asked[-1].tag, **fields))
    session.poll()


def send_heartbeat(engine, poll, session, **fields):
    heartbeat = Heartbeat(epoch=engine.epoch, time_ns=1, seq=engine.seq, step=engine.step, **fields)
    engine.source.updates.append(Update(heartbeat=heartbeat))
    poll(session)


def pack_block_ids(*blocks):
    return np.array(blocks, "<u4").tobytes()


@pytest.fixture
def window(engine, session, make_window, poll):
    """Main window in which request 3 runs on blocks 4 and 5, and blocks 8 and 9 are cached."""
    window = make_window(session)
    engine.ledger.hash[[4, 8, 9]] = (1, 2, 3)
    engine.write_blocks([4, 5], owner=3)
    engine.write_blocks([8, 9], owner=2, state=BlockState.CACHED, ref_count=0)
    engine.request(3, blocks=(4, 5))
    poll(session)
    set_status(engine, session)
    return window


def select_block(window, block):
    window.page_map.canvas.cursor_block = block
    window.session.status_changed.emit()


def test_debug_actions_are_disabled_for_viewers_with_the_reason(engine, session, window):
    set_status(engine, session, role="viewer")
    for spec in window.actions_by_name.in_group(DEBUG):
        action = window.actions_by_name[spec.name]
        assert not action.isEnabled()
        assert "viewer" in action.toolTip()


def test_engine_without_interventions_can_still_be_paused(engine, session, window):
    set_status(engine, session, intervenes=False)
    actions = window.actions_by_name
    assert actions["pause_engine"].isEnabled()
    assert not actions["step"].isEnabled()
    assert not actions["limits"].isEnabled()
    assert "not reported support" in actions["limits"].toolTip()


def test_step_actions_are_enabled_only_while_the_engine_is_paused(engine, session, window):
    step = window.actions_by_name["step"]
    assert not step.isEnabled()
    assert "pause it first" in step.toolTip()
    window.actions_by_name["pause_engine"].trigger()
    reply_to_last_command(engine, session)
    set_status(engine, session, SourceState.PAUSED, "by ann")
    assert step.isEnabled()
    window.actions_by_name["step_more"].trigger()
    command = engine.source.sent[-1]
    assert isinstance(command, Control)
    assert (command.action, command.num_steps) == ("step", 10)


def test_resume_and_unpin_are_disabled_without_a_pause_or_pinned_block(engine, session, window, poll):
    actions = window.actions_by_name
    resume, unpin = actions["resume"], [actions["unpin_all"], actions["unpin_anyones"]]
    assert not resume.isEnabled()
    assert "not paused" in resume.toolTip()
    assert not any(action.isEnabled() for action in unpin)
    assert unpin[0].toolTip() == "No block is pinned"
    actions["pause_engine"].trigger()
    reply_to_last_command(engine, session)
    assert resume.isEnabled()  # before the engine's status says that it is paused
    actions["resume"].trigger()
    reply_to_last_command(engine, session)
    assert not resume.isEnabled()
    set_status(engine, session, SourceState.PAUSED, "by ann")
    assert resume.isEnabled()
    send_heartbeat(engine, poll, session, pinned=pack_block_ids(8), pinned_by="ann")
    session.status_changed.emit()
    assert all(action.isEnabled() for action in unpin)


def test_paused_bar_shows_who_paused_the_engine_and_the_last_reply(engine, session, window):
    bar = window.paused_bar
    assert not bar.isVisible()
    set_status(engine, session, SourceState.PAUSED, "by ann")
    assert bar.isVisible()
    assert bar.paused_by.text() == "Paused by ann"
    window.actions_by_name["pause_engine"].trigger()
    reply_to_last_command(engine, session)
    set_status(engine, session, SourceState.PAUSED, "by ann, me")
    assert bar.paused_by.text() == "Paused by you"
    window.actions_by_name["resume"].trigger()
    reply_to_last_command(engine, session)
    set_status(engine, session)
    window.actions_by_name["pause_engine"].trigger()
    reply_to_last_command(engine, session)
    set_status(engine, session)  # the engine's status follows a little later
    set_status(engine, session, SourceState.PAUSED, "by me")
    assert bar.paused_by.text() == "Paused by you"
    step = next(button for button in bar.buttons if button.text() == "Step")
    step.click()
    reply_to_last_command(engine, session, what="step 12 ran")
    assert bar.answer.text() == "Step 12 ran"
    set_status(engine, session)
    assert not bar.isVisible()


def test_buttons_of_the_paused_bar_are_disabled_for_viewers(engine, session, window):
    set_status(engine, session, SourceState.PAUSED, "by ann", role="viewer")
    assert window.paused_bar.isVisible()
    assert not any(button.isEnabled() for button in window.paused_bar.buttons)
    assert all("viewer" in button.toolTip() for button in window.paused_bar.buttons)


def test_selected_request_can_be_preempted_and_aborted(engine, session, window):
    actions = window.actions_by_name
    assert "No request is selected" in actions["preempt_swap"].toolTip()
    session.selection.select_request(3)
    assert actions["preempt_recompute"].text() == "Preempt request #3 (recompute)"
    actions["preempt_recompute"].trigger()
    assert engine.source.sent[-1] == Preempt(number=3, how="recompute", tag=engine.source.sent[-1].tag)
    reply_to_last_command(engine, session, Failed, reason="request 3 cannot be swapped out: no lower tier")
    assert window.statusBar().currentMessage().lower().startswith("request 3 cannot be swapped out")
    actions["abort_request"].trigger()
    (question,) = window.findChildren(QMessageBox)
    assert "Abort request chat-3?" in question.text()
    session.selection.select_request(None)
    next(button for button in question.buttons() if button.text().startswith("Abort")).click()
    assert engine.source.sent[-1] == Abort(request_id="chat-3", anyones=True)
    engine.source.replies.append(Done(request_id="chat-3"))
    session.poll()
    assert window.statusBar().currentMessage() == "Request #3 was aborted"


def test_waiting_request_cannot_be_preempted(engine, session, window, poll):
    engine.request(5, state=0)
    engine.request(6, state=3)
    poll(session)
    set_status(engine, session)
    session.selection.select_request(5)
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
                "preempt_swap": "vllm recomputes preempted requests: it cannot swap",
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
    engine.write_blocks([4], owner=3)
    engine.request(3, blocks=(4,))
    poll(session)
    window = make_window(session)
    set_status(engine, session)
    session.selection.select_request(3)
    select_block(window, 4)
    names = ("preempt_swap", "preempt_recompute", "pin_block", "pin_prefix", "pin_request", "limits")
    disabled = {name: window.actions_by_name[name] for name in names if not window.actions_by_name[name].isEnabled()}
    assert {name: action.toolTip() for name, action in disabled.items()} == refused


def test_selected_block_can_be_pinned_unpinned_and_evicted(engine, session, window, poll):
    actions = window.actions_by_name
    select_block(window, 8)
    assert actions["evict_block"].text() == "Evict block 8 from the prefix cache"
    actions["pin_prefix"].trigger()
    assert engine.source.sent[-1] == Pin(blocks=(8,), with_prefix=True, tag=engine.source.sent[-1].tag)
    reply_to_last_command(engine, session, what="1 block is pinned until you disconnect")
    send_heartbeat(engine, poll, session, pinned=pack_block_ids(8), pinned_by="ann")
    set_status(engine, session)
    assert "pinned: unpin" in actions["evict_block"].toolTip()
    assert ("Pinned", "by ann: protected from eviction") in window.page_map.facts_of(8).rows
    actions["unpin_block"].trigger()
    assert engine.source.sent[-1] == Unpin(blocks=(8,), anyones=True, tag=engine.source.sent[-1].tag)
    send_heartbeat(engine, poll, session)
    select_block(window, 9)
    actions["evict_block"].trigger()
    assert engine.source.sent[-1] == Evict(blocks=(9,), tag=engine.source.sent[-1].tag)
    select_block(window, 5)
    assert "not in the prefix cache" in actions["pin_block"].toolTip()
    assert "in use" in actions["evict_block"].toolTip()
    select_block(window, -1)
    assert "No block is selected" in actions["pin_block"].toolTip()


def test_pin_is_disabled_if_an_unfinished_request_would_have_too_few_blocks(engine, session, window, poll):
    actions = window.actions_by_name
    engine.ledger.parent[9] = 2  # block 8 is the parent of block 9
    engine.ledger.hash[20] = 4
    engine.frame([9, 20])
    engine.request(4, blocks=(20, 21), num_prompt_tokens=20, max_tokens=63 * 16 - 20)
    poll(session)
    set_status(engine, session)
    select_block(window, 9)
    assert actions["pin_block"].isEnabled()
    assert not actions["pin_prefix"].isEnabled()
    reason = "Pinning these would leave 62 of 64 blocks to others, and request 4 may need 63"
    assert actions["pin_prefix"].toolTip() == reason
    session.selection.select_request(2)
    assert actions["pin_request"].toolTip() == reason
    send_heartbeat(engine, poll, session, pinned=pack_block_ids(40))
    set_status(engine, session)
    select_block(window, 9)
    assert actions["pin_block"].toolTip() == reason
    engine.request(4, state=RequestState.FINISHED)
    poll(session)
    set_status(engine, session)
    select_block(window, 9)
    assert actions["pin_prefix"].isEnabled()


def test_pin_is_enabled_for_blocks_that_the_largest_request_uses_or_may_reuse(engine, session, window, poll):
    """The engine counts such blocks as the request's own. The blocks of a waiting request are unknown to the window."""
    actions = window.actions_by_name
    engine.request(6, blocks=(4, 5), max_tokens=64 * 16 - 20)
    poll(session)
    set_status(engine, session)
    select_block(window, 4)
    assert actions["pin_block"].isEnabled()
    select_block(window, 8)
    assert not actions["pin_block"].isEnabled()
    engine.request(6, state=RequestState.PREEMPTED, max_tokens=64 * 16 - 20)
    poll(session)
    set_status(engine, session)
    select_block(window, 8)
    assert actions["pin_block"].isEnabled()


def test_blocks_of_the_selected_request_are_pinned_or_evicted_together(engine, session, window):
    session.selection.select_request(2)
    window.actions_by_name["evict_request"].trigger()
    assert engine.source.sent[-1].blocks == (8, 9)
    session.selection.select_request(3)
    assert not window.actions_by_name["evict_request"].isEnabled()
    window.actions_by_name["pin_request"].trigger()
    assert engine.source.sent[-1].blocks == (4,)


def test_pinned_block_is_marked_on_the_page_map(engine, session, window, poll):
    canvas = window.page_map.canvas
    window.page_map.draw_all()
    before = canvas.grab().toImage()
    send_heartbeat(engine, poll, session, pinned=pack_block_ids(9), pinned_by="ann")
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


def test_block_and_request_actions_are_disabled_in_the_past(engine, session, window):
    select_block(window, 8)
    session.selection.select_request(3)
    session.timeline.pause()
    set_status(engine, session)
    for name in (*BLOCK_ACTIONS, *REQUEST_ACTIONS):
        assert "past" in window.actions_by_name[name].toolTip()
    assert window.actions_by_name["pause_engine"].isEnabled()


@pytest.mark.qt_log_ignore("grabbing the keyboard", extend=True)
def test_context_menu_of_the_map_acts_on_the_block_under_the_pointer(engine, session, window, qtbot):
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


def test_context_menu_of_the_request_table_contains_debugger_actions(session, make_window):
    window = make_window(session, with_views=("requests",))
    assert window.actions_by_name["preempt_swap"] in window.views["requests"].table.actions()


def test_limits_dialog_sends_new_limits_and_shows_the_reply(engine, session, window, poll):
    send_heartbeat(engine, poll, session, max_num_seqs=8, max_num_batched_tokens=512)
    window.actions_by_name["limits"].trigger()
    dialog = next(w for w in QApplication.topLevelWidgets() if isinstance(w, LimitsDialog))
    assert dialog.fields["max_num_seqs"].value() == 8
    dialog.fields["max_num_seqs"].setValue(3)
    dialog.apply()
    command = engine.source.sent[-1]
    assert (type(command), command.max_num_seqs, command.max_num_batched_tokens) == (SetLimits, 3, 512)
    reply_to_last_command(engine, session, what="max_num_seqs is 3, max_num_batched_tokens 512")
    assert dialog.answer.text() == "max_num_seqs is 3, max_num_batched_tokens 512"
    dialog.apply()
    dialog.close()
    dialog.deleteLater()
    reply_to_last_command(engine, session, Failed, reason="too late for the dialog")
    assert window.statusBar().currentMessage().lower() == "too late for the dialog"


def test_request_table_has_exactly_one_abort_action(session, window, qtbot):
    view = RequestsView(session)
    qtbot.addWidget(view)
    add_to_requests(view.table, window.actions_by_name)
    assert sum("bort" in action.text() for action in view.table.actions()) == 1
