"""The synthetic engine answers the debugger's commands, and its mirror stays true."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.synthetic.engine import SyntheticEngine
from kvscope_telemetry.synthetic.server import SyntheticServer

WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[SyntheticServer]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        server = SyntheticServer(SyntheticEngine(num_blocks=800, num_host_blocks=300), f"ipc://{Path(folder)}")
        yield server
        server.close()


def test_it_is_paused_stepped_and_told_as_a_real_one_is(server: SyntheticServer) -> None:
    mirror, replies, tag = Mirror(), [], 0
    with LiveSource(server.sockets.telemetry_endpoint) as source:

        def look() -> None:
            replies.extend(reply for reply in source.take_replies() if not isinstance(reply, Status))
            update = source.take_update()
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
        running = next(n for n in mirror.requests.number if mirror.requests.state[mirror.requests.row_of(int(n))] == 1)
        preempted = [n for n in range(int(running), int(running) + 60) if isinstance(do(Preempt(number=n)), Done)]
        assert preempted
        assert source.wait(agrees, WAIT_S)
        assert mirror.requests.state[mirror.requests.row_of(preempted[-1])] in (
            RequestState.PREEMPTED,
            RequestState.RUNNING,  # the step that told of it let it in again
        )
        block = int((mirror.ledger.state[:800] == BlockState.CACHED).nonzero()[0][0])
        assert isinstance(do(Pin(blocks=(block,))), Done)
        assert source.wait(lambda: (look(), mirror.pinned == {block})[1], WAIT_S)
        assert "pinned" in getattr(do(Evict(blocks=(block,))), "reason", "")
        assert isinstance(do(SetLimits(max_num_seqs=1)), Failed)
        do(Control(action="step", num_steps=300))
        assert mirror.pinned == {block}
        assert server.engine.ledger.hash[block]
        assert source.wait(agrees, WAIT_S)


def test_what_a_client_holds_goes_on_when_it_is_gone(server: SyntheticServer) -> None:
    with LiveSource(server.sockets.telemetry_endpoint) as watcher:
        with LiveSource(server.sockets.telemetry_endpoint) as holder:
            assert holder.wait(lambda: holder.status.state is SourceState.LIVE, 60)
            holder.send(Control(action="pause", tag=1))
            assert holder.wait(lambda: bool(holder.take_replies()), 60)
            assert watcher.wait(lambda: watcher.status.state is SourceState.PAUSED, 60)
        step = server.engine.step
        assert watcher.wait(lambda: server.engine.step > step, 60)
        assert watcher.wait(lambda: watcher.status.state is SourceState.LIVE, 60)
