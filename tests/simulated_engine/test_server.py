"""The simulated engine answers the debugger's commands as the real one, and its mirror stays true."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.simulated_engine.command import COMMAND
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import (
    Command,
    Control,
    Done,
    Evict,
    Failed,
    Pin,
    Preempt,
    Reply,
    SetLimits,
    Status,
)
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[SimulatedServer]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        server = SimulatedServer(SimulatedEngine(num_blocks=800, num_host_blocks=300), f"ipc://{Path(folder)}")
        yield server
        server.close()


def test_it_is_paused_stepped_and_told_as_a_real_one_is(server: SimulatedServer) -> None:
    mirror, replies, tag = Mirror(), [], 0
    with LiveSource(server.sockets.telemetry_endpoint) as source:

        def look() -> None:
            replies.extend(reply for reply in source.poll_replies() if not isinstance(reply, Status))
            update = source.poll_update()
            if update is not None:
                mirror.apply(update)

        def do(command: Command) -> Reply:
            source.send(command)

            def answered() -> bool:
                look()
                return bool(replies)

            assert source.wait(answered, WAIT_S)
            return replies.pop()

        def agrees() -> bool:
            look()
            return mirror.ledger.equals(server.engine.ledger)

        assert source.wait(lambda: (look(), mirror.hello is not None)[1], WAIT_S)
        assert isinstance(do(Control(action="step", tag=(tag := tag + 1))), Failed)
        assert isinstance(do(Control(action="pause", tag=(tag := tag + 1))), Done)
        step = server.engine.step
        assert isinstance(do(Control(action="step", num_steps=3, tag=(tag := tag + 1))), Done)
        assert server.engine.step == step + 3
        assert source.wait(agrees, WAIT_S)
        is_background = (mirror.requests.state == RequestState.RUNNING) & (mirror.requests.num_output_tokens > 0)
        running = int(mirror.requests.number[is_background.nonzero()[0][0]])
        assert isinstance(do(Preempt(number=running)), Done)
        assert source.wait(agrees, WAIT_S)
        assert mirror.requests.state[mirror.requests.row_of(running)] == RequestState.PREEMPTED
        assert isinstance(do(Preempt(number=running)), Failed)
        block = int((mirror.ledger.state[:800] == BlockState.CACHED).nonzero()[0][0])
        assert isinstance(do(Pin(blocks=(block,))), Done)
        assert source.wait(lambda: (look(), mirror.pinned == {block})[1], WAIT_S)
        assert "pinned" in getattr(do(Evict(blocks=(block,))), "reason", "")
        assert isinstance(do(SetLimits(max_num_seqs=1)), Done)
        assert isinstance(do(SetLimits(max_num_seqs=1_000_000)), Failed)
        do(Control(action="step", num_steps=300))
        assert mirror.pinned == {block}
        assert server.engine.ledger.hash[block]
        assert source.wait(agrees, WAIT_S)


def test_what_a_client_holds_goes_on_when_it_is_gone(server: SimulatedServer) -> None:
    with LiveSource(server.sockets.telemetry_endpoint) as watcher:
        with LiveSource(server.sockets.telemetry_endpoint) as holder:
            assert holder.wait(lambda: holder.status.state is SourceState.LIVE, 60)
            holder.send(Control(action="pause", tag=1))
            assert holder.wait(lambda: bool(holder.poll_replies()), 60)
            assert watcher.wait(lambda: watcher.status.state is SourceState.PAUSED, 60)
        step = server.engine.step
        assert watcher.wait(lambda: server.engine.step > step, 60)
        assert watcher.wait(lambda: watcher.status.state is SourceState.LIVE, 60)


def test_it_serves_from_the_command_line() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        options = ["--endpoint", f"ipc://{folder}/telemetry", "--blocks", "100", "--seconds", "0.2"]
        done = subprocess.run([*COMMAND, *options], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving ipc://" in done.stdout
    bad = subprocess.run([*COMMAND, "--endpoint", "nowhere"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "'nowhere'" in bad.stderr
    assert "Traceback" not in bad.stderr
