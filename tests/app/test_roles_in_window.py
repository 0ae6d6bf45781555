"""Tests of a window for viewers, while another client has paused the engine, and when access is denied."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QSettings
from tests.app.window_driver import (
    current_view_text,
    has_no_running_timer,
    load_only_views,
    status_label,
    visible_texts,
)
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.load_generator.generator import LoadGenerator
from kvscope_app.load_generator.load_settings import LoadSettings
from kvscope_app.views.console import chat as chat_module
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.commands import Abort, Control, Done, Failed, GetBlockText, Tokens
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.source import SourceState, SourceStatus

CONTROLS = ("pause_engine", "resume", "reset_cache")


def set_status(engine, session, state=SourceState.LIVE, reason="", role=""):
    engine.source.status = SourceStatus(state, reason, role=role)
    session.poll()


def test_viewer_role_is_shown_and_operator_actions_are_disabled(engine, session, make_window):
    window = make_window(session, with_views=("console",))
    set_status(engine, session, role="viewer")
    assert status_label(window, "role").text() == "viewer"
    assert status_label(window, "role").isVisible()
    for name in CONTROLS:
        assert not window.actions_by_name[name].isEnabled()
        assert "viewer" in window.actions_by_name[name].toolTip()
    console = window.views["console"]
    console.page.composer.set_text("hello")
    console.refresh()
    assert not console.page.composer.button.isEnabled()
    assert "Viewers" in console.page.composer.button.toolTip()
    assert not console.load.button.isEnabled()
    assert "viewer" in console.load.button.toolTip()
    assert not any(isinstance(command, GetBlockText) for command in engine.source.sent)
    set_status(engine, session, role="operator")
    console.refresh()
    assert not status_label(window, "role").isVisible()
    assert all(window.actions_by_name[name].isEnabled() for name in ("pause_engine", "reset_cache"))
    assert console.page.composer.button.isEnabled()
    assert console.load.button.isEnabled()


def test_paused_engine_is_shown_as_paused_with_the_client_name(engine, session, make_window):
    window = make_window(session)
    set_status(engine, session, SourceState.PAUSED, "by alice")
    assert current_view_text(window) == "ENGINE PAUSED"
    assert status_label(window, "state").text() == "Engine paused by alice"
    set_status(engine, session)
    assert current_view_text(window) == "LIVE"


def test_pause_command_of_an_operator_is_sent_with_a_lease_time(engine, session, make_window):
    window = make_window(session)
    set_status(engine, session, role="operator")
    window.actions_by_name["pause_engine"].trigger()
    (command,) = engine.source.sent
    assert isinstance(command, Control)
    assert command.action == "pause"
    assert command.lease_s > 0


def test_denied_access_is_shown_in_the_window_and_printed_once(engine, session, make_window, capsys):
    window = make_window(session)
    reason = "the engine at tcp://192.0.2.1:1 does not know this key ('laptop')"
    for _ in range(3):
        set_status(engine, session, SourceState.REFUSED, reason)
    assert window.banner.text == reason
    assert reason in visible_texts(window.welcome)
    assert capsys.readouterr().err.count(reason) == 1
    set_status(engine, session)
    assert window.banner.text == ""


@pytest.fixture
def chat(session, tmp_path, qtbot):
    chat = Chat(session, ConversationStore(tmp_path / "chats"))
    yield chat
    chat.save()
    chat.deleteLater()


def test_answer_ends_as_interrupted_if_its_abort_is_refused(engine, session, chat, qtbot):
    conversation = chat.conversations[0]
    chat.ask(conversation, "hello")
    chat.stop(conversation)
    (abort,) = [command for command in engine.source.sent if isinstance(command, Abort)]
    engine.source.replies.append(Failed(reason="it is another client's", request_id=abort.request_id))
    session.poll()
    qtbot.waitUntil(lambda: not chat.is_writing(conversation.key), timeout=120_000)
    assert conversation.messages[-1].ending == "interrupted"


def test_stopped_answer_ends_after_a_timeout_without_a_final_reply(engine, session, chat, qtbot, monkeypatch):
    monkeypatch.setattr(chat_module, "STOP_TIMEOUT_MS", 50)
    conversation = chat.conversations[0]
    chat.ask(conversation, "hello")
    chat.stop(conversation)
    engine.source.replies.append(Done(request_id=engine.source.sent[-1].request_id))
    session.poll()
    assert chat.is_writing(conversation.key)
    qtbot.waitUntil(lambda: not chat.is_writing(conversation.key), timeout=120_000)
    assert conversation.messages[-1].ending == "stopped"


def test_load_generator_ends_if_its_aborts_are_refused(engine, session, qtbot):
    generator = LoadGenerator(session)
    generator.start(LoadSettings(concurrency=2))
    generator.stop()
    for command in list(engine.source.sent):
        if isinstance(command, Abort):
            engine.source.replies.append(Failed(reason="it is another client's", request_id=command.request_id))
    session.poll()
    assert not generator.is_stopping
    assert (generator.counts.lost, generator.message) == (2, "it is another client's")
    qtbot.waitUntil(lambda: has_no_running_timer(generator), timeout=120_000)
    generator.deleteLater()


def test_missed_parts_of_an_answer_are_reported(engine, session, chat):
    received = []
    chat.notified.connect(received.append)
    chat.ask(chat.conversations[0], "hello")
    name = engine.source.sent[-1].request_id
    engine.source.replies.append(Tokens(request_id=name, token_ids=(1,), text="x", num_missed=7))
    session.poll()
    assert received == ["7 pieces of this answer were lost while disconnected."]


def test_viewer_key_gives_access_and_removed_key_is_refused(qapp, tmp_path, qtbot):
    ring = KeyRing(tmp_path / "keys")
    for name in ("guest", "gone"):
        ring.new(name, Role.VIEWER, tmp_path / f"{name}.key")
    ring.remove("gone")
    server = SimulatedServer(SimulatedEngine(num_blocks=600), "tcp://127.0.0.1:0", keys=ring)
    endpoint = server.sockets.telemetry_endpoint
    settings = QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat)
    desktop = Desktop(qapp, Options(theme="dark"), settings)
    try:
        guest, gone = (desktop.open_window(endpoint, key=tmp_path / f"{name}.key") for name in ("guest", "gone"))
        for window in (guest, gone):
            load_only_views(window)
        qtbot.waitUntil(lambda: guest.session.mirror.num_blocks == 600, timeout=120_000)
        qtbot.waitUntil(lambda: guest.session.is_viewer, timeout=120_000)
        qtbot.waitUntil(lambda: "does not know this key" in gone.banner.text, timeout=120_000)
    finally:
        for window in list(desktop.windows):
            window.close()
            window.deleteLater()
        desktop.close()
        desktop.deleteLater()
        server.close()
