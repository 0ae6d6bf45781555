"""Tests of the messages about an engine that failed to start, cannot be reached, or needs a restart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QLabel, QMessageBox, QPushButton
from tests.app import window_driver as driver

from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_app.window.window_actions import close_question
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.source import SourceState

REASON = "max_model_len=8192 is not accepted with allocator='contiguous': " + "so many blocks are not there, " * 5
REMEDY = "(--max-model-len 2048)"


class FakeSupervisor(QObject):
    """Supervisor of an engine process that was never started."""

    ended = Signal(str)
    started = Signal()
    is_running = False
    engine = SimpleNamespace(log_text=lambda: "")

    def detach(self):
        """Do nothing; there is no process."""


@pytest.fixture
def window_and_supervisor(make_engine, make_session, make_window):
    """Window whose engine ended with a long reason, and its supervisor."""
    engine = make_engine()
    engine.source.updates.clear()
    engine.set_status(SourceState.CONNECTING)
    supervisor = FakeSupervisor()
    window = make_window(make_session(engine), supervisor=supervisor, size=(900, 700))
    supervisor.ended.emit(REASON + REMEDY)
    return window, supervisor


def test_long_reason_is_wrapped_and_not_truncated(window_and_supervisor, qtbot):
    window, _ = window_and_supervisor
    (words,) = [label for label in window.banner.findChildren(QLabel) if label.text().endswith(REMEDY)]
    qtbot.waitUntil(lambda: words.height() >= words.heightForWidth(words.width()), timeout=60_000)
    assert words.height() > 2 * words.fontMetrics().height()


def test_ended_engine_is_shown_as_stopped_until_it_is_restarted(window_and_supervisor):
    window, supervisor = window_and_supervisor
    window.session.poll()
    assert window.session.status.state is SourceState.ENDED
    assert driver.status_label(window, "state").text().startswith("Stopped: max_model_len=8192")
    supervisor.started.emit()
    assert window.session.status.state is SourceState.CONNECTING


def test_unreachable_address_shows_the_reason_and_can_be_changed(make_engine, make_session, make_window, qtbot):
    engine = make_engine()
    engine.source.updates.clear()
    engine.set_status(SourceState.CONNECTING)
    session = make_session(engine)
    attached = []
    window = make_window(session, attach=attached.append)
    why = "nothing listens on 127.0.0.1:7710 (connection refused)"
    engine.set_status(SourceState.CONNECTING, why)
    driver.poll_until(session, lambda: session.status.reason == why, qtbot)
    words = [label.text() for label in window.welcome.findChildren(QLabel)]
    assert any("Nothing listens on 127.0.0.1:7710" in text for text in words)
    buttons = {button.text(): button for button in window.welcome.findChildren(QPushButton) if not button.isHidden()}
    assert {"Change address…", "Cancel"} <= buttons.keys()
    qtbot.mouseClick(buttons["Change address…"], Qt.MouseButton.LeftButton)
    dialog = window.findChild(AttachDialog)
    dialog.fields.address_line.setText("ipc:///nowhere/telemetry")
    attach = next(button for button in dialog.findChildren(QPushButton) if button.text() == "Attach")
    attach.click()
    assert [address.text for address in attached] == ["ipc:///nowhere/telemetry"]
    assert not window.isVisible()


def test_waiting_message_can_be_cancelled_and_is_hidden_once_the_engine_answers(
    make_engine, make_session, make_window, poll, qtbot
):
    engine = make_engine()
    updates = list(engine.source.updates)
    engine.source.updates.clear()
    engine.set_status(SourceState.CONNECTING, "no socket file /nowhere/telemetry")
    session = make_session(engine)
    window = make_window(session)
    driver.poll_until(session, lambda: "Cancel" in driver.visible_texts(window.welcome), qtbot)
    assert "Change address…" not in driver.visible_texts(window.welcome)  # no `attach` callback was given
    engine.source.updates.extend(updates)
    engine.set_live()
    poll(session)
    assert window.page_map.isVisible()


class FakeProcess(SimpleNamespace):
    """Engine process that stores the options set on it."""

    def set_option(self, flag, value):
        self.options_set.append((flag, value))


@pytest.mark.parametrize(("is_rounded", "value"), [(False, "a8"), (True, "auto")])
def test_change_of_8_bit_activations_is_confirmed_and_restarts_the_engine(
    is_rounded, value, make_engine, make_session, make_window
):
    engine, supervisor = make_engine(), FakeSupervisor()
    supervisor.engine, supervisor.restart = (
        FakeProcess(options_set=[]),
        lambda: supervisor.engine.options_set.append("restart"),
    )
    window = make_window(make_session(engine), supervisor=supervisor, size=(900, 700))
    hello = window.session.live_mirror.hello
    model = replace(hello.model, quantization="int4-a8" if is_rounded else "int4")
    window.session.live_mirror.hello = replace(hello, model=model)
    window.session.status_changed.emit()
    names = ("activations_8_bits", "activations_as_they_are")
    assert [window.actions_by_name[name].isEnabled() for name in names] == [not is_rounded, is_rounded]
    window.actions_by_name[names[is_rounded]].trigger()
    (question,) = window.findChildren(QMessageBox)
    assert ("full-precision" if is_rounded else "Answers change") in question.text()
    assert supervisor.engine.options_set == []
    next(b for b in question.buttons() if b is not question.defaultButton()).click()
    assert supervisor.engine.options_set == [("--quantization", value), "restart"]


def test_closing_asks_if_the_own_engine_has_unfinished_requests(make_engine, make_session, make_window, poll):
    engine = make_engine()
    session = make_session(engine)
    engine.request(1)
    poll(session)
    owning, watching = make_window(session, supervisor=FakeSupervisor()), make_window(session)
    assert close_question(owning) == "Stop the engine and its 1 unfinished request?"
    assert close_question(watching) == ""
    owning.actions_by_name["close"].trigger()
    (box,) = owning.findChildren(QMessageBox)
    assert owning.isVisible()
    box.reject()
    engine.request(1, state=RequestState.FINISHED)
    poll(session)
    assert close_question(owning) == ""
