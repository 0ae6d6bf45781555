"""A command passes a limited number of files from a click on *Pause engine* to the bar that reports it: a real run is
traced.

A file counts if one of its functions handles the command, its answer, or the fact that the engine is paused and by
whom, as messages, bytes or text. Other uses (other views, block texts, events) do not count.
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from pytestqt.qtbot import QtBot
from tests.app.conftest import make_window, qapp_args, settings, themes  # noqa: F401
from tests.engine.server import fake_engine
from tests.ways import Following, check_way

from kvscope_app.session.session import Session
from kvscope_engine.server.service import EngineService
from kvscope_telemetry import LiveSource
from kvscope_telemetry.messages.commands import Control, Done, Status
from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.source import SourceState

WAY: Final = (
    "app/kvscope_app/actions/action_registry.py",
    "app/kvscope_app/debugger/debugger.py",
    "app/kvscope_app/session/session.py",
    "engine/kvscope_telemetry/sources/live_source.py",
    "engine/kvscope_telemetry/sources/live_reader.py",
    "engine/kvscope_telemetry/messages/wire.py",
    "engine/kvscope_telemetry/transport/client_sockets.py",
    "engine/kvscope_telemetry/transport/server_sockets.py",
    "engine/kvscope_telemetry/transport/authenticator.py",
    "engine/kvscope_telemetry/messages/roles.py",
    "engine/kvscope_engine/server/command_receiver.py",
    "engine/kvscope_engine/server/dispatcher.py",
    "engine/kvscope_engine/server/client_interventions.py",
    "engine/kvscope_telemetry/transport/reply_sender.py",
    "engine/kvscope_telemetry/sources/liveness.py",
    "app/kvscope_app/debugger/paused_bar.py",
)
BESIDE: Final = {
    "app/kvscope_app/session/block_texts/session_texts.py": "is given every answer and takes those with texts",
    "app/kvscope_app/window/engine_notices.py": "is given every answer and shows those that nobody waits for",
    "engine/kvscope_telemetry/messages/command_size.py": "what waits is bounded by its size",
    "engine/kvscope_telemetry/messages/unknown.py": "words of a later version",
    "engine/kvscope_telemetry/sources/reply_queue.py": "answers wait to be taken",
}
NAME: Final = "somebody-with-a-name"
WAIT_MS: Final = 60_000


def is_about_the_command(value: Any) -> bool:
    """Return whether a value is the command, its answer, or the fact that the engine is paused."""
    if isinstance(value, Control):
        return value.action == "pause"
    if isinstance(value, Status):
        return value.paused
    if isinstance(value, bytes):
        return (b"Control" in value and b"pause" in value) or b"Done" in value
    if isinstance(value, str):
        return value in ("pause", NAME, "you")
    return isinstance(value, Done) or value is SourceState.PAUSED


def test_pause_command_reaches_the_engine_and_back_through_the_listed_source_files_only(
    socket_folder: Path,
    qtbot: QtBot,
    make_window: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=NAME))
    with Following(is_about_the_command, but_not_by=(Heartbeat,)) as trace:
        service = EngineService(f"ipc://{socket_folder}", fake_engine.builder(fake_engine.FakeEngineOptions()))
        engine = threading.Thread(target=service.run)
        engine.start()
        session = Session(LiveSource(f"ipc://{socket_folder}"))
        window = make_window(session)
        session.start()
        pause = window.actions_by_name["pause_engine"]
        qtbot.waitUntil(pause.isEnabled, timeout=WAIT_MS)
        trace.begin()
        pause.trigger()
        qtbot.waitUntil(lambda: window.paused_bar.paused_by.text() == "Paused by you", timeout=WAIT_MS)
        trace.end()
    window.close()
    session.close()
    service.stop()
    engine.join()
    print(*sorted(trace.functions), sep="\n")  # shown if the test fails
    check_way(trace.ran, WAY, BESIDE)
