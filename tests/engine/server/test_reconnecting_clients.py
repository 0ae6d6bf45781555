"""Clients that leave, come back, pause the engine and are killed: effects on their requests and on other clients."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kvscope_engine.server import sessions
from kvscope_engine.server.service import EngineService
from kvscope_engine.server.service_limits import MIB, Bound, ServiceLimits
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Awaited,
    Control,
    Done,
    Failed,
    Finished,
    GetStatus,
    Refused,
    Reply,
    Status,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

if TYPE_CHECKING:
    from conftest import Client

WAIT_S = 60.0
ENDLESS = 1_000_000


class RunningService:
    """A service of a fake engine on its own thread."""

    def __init__(self, endpoint: str, fake: ModuleType, limits: ServiceLimits | None = None, **options: Any) -> None:
        build = fake.builder(fake.FakeEngineOptions(**options))
        self.service = EngineService(endpoint, build, keyless=Role.OPERATOR, limits=limits)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def close(self) -> None:
        self.service.stop()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@pytest.fixture
def start_service(folder: Path, fake: ModuleType) -> Iterator[Callable[..., RunningService]]:
    sites: list[RunningService] = []

    def make(endpoint: str = "", **options: Any) -> RunningService:
        sites.append(RunningService(endpoint or f"ipc://{folder}", fake, **options))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


def submit(request_id: str, max_tokens: int = ENDLESS, n: int = 1) -> Submit:
    return Submit(request_id=request_id, prompt="hello", sampling=SamplingParams(max_tokens=max_tokens, n=n))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def introduce(client: Client, token: str, *awaited: Awaited) -> Status:
    return client.ask(GetStatus(session=token, awaited=awaited), Status)


def received_tokens(client: Client) -> list[int]:
    """Return the received tokens in order; the fake engine's tokens are step numbers."""
    return [i for reply in client.replies if isinstance(reply, Tokens) for i in reply.token_ids]


# Pauses

PAUSER = """
import sys, time
from kvscope_telemetry.messages.commands import Control, Done
from kvscope_telemetry.sources.live_source import LiveSource
source = LiveSource(sys.argv[1])
source.send(Control(action="pause", lease_s=float(sys.argv[2])))
source.wait(lambda: any(isinstance(r, Done) for r in source.poll_replies()), 60)
print("paused", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pausing_process(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Function that starts a process which pauses the engine."""
    processes: list[subprocess.Popen[bytes]] = []

    def make(lease_s: float = 0.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PAUSER, f"ipc://{folder}", str(lease_s)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        stdout = processes[-1].stdout
        assert stdout is not None
        assert stdout.readline() == b"paused\n"
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def test_pause_ends_with_its_client(
    start_service: Callable[..., RunningService],
    client: Client,
    pausing_process: Callable[..., subprocess.Popen[bytes]],
) -> None:
    start_service(step_s=0.001)
    client.wait_ready()
    process = pausing_process()
    beat = client.telemetry(Heartbeat, lambda beat: bool(beat.paused_by))
    assert beat.paused_by == client.ask(GetStatus(), Status).paused_by
    client.send(submit("mine", max_tokens=5))
    client.receive(Accepted)
    assert client.dealer.poll(300) == 0, "nothing is said while it is paused"
    process.send_signal(signal.SIGKILL)
    assert client.receive(Finished).finish_reason == "length"
    client.telemetry(Heartbeat, lambda beat: not beat.paused_by)
    assert not client.ask(GetStatus(), Status).paused


def test_lease_ends_the_pause_of_a_hanging_client(
    start_service: Callable[..., RunningService],
    client: Client,
    pausing_process: Callable[..., subprocess.Popen[bytes]],
) -> None:
    site = start_service()
    client.wait_ready()
    process = pausing_process(3.0)
    ((_, pause),) = site.service.receiver.pausing_clients._pauses.items()
    last_message_ns = pause.last_message_ns
    wait_for(lambda: pause.last_message_ns > last_message_ns)  # the client library renews the lease
    assert client.ask(GetStatus(), Status).paused
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: not client.ask(GetStatus(), Status).paused)


def test_engine_paused_by_two_clients_stays_paused_if_one_leaves_until_anyone_resumes(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service()
    first, second, third = new_client(), new_client(), new_client()
    first.wait_ready()
    for client in (first, second):
        client.ask(Control(action="pause"), Done)
    first.dealer.close(linger=0)
    time.sleep(1.2)
    assert third.ask(GetStatus(), Status).paused
    third.ask(Control(action="resume"), Done)
    assert not third.ask(GetStatus(), Status).paused


def test_source_status_names_who_paused_the_engine(start_service: Callable[..., RunningService], folder: Path) -> None:
    start_service()
    with LiveSource(f"ipc://{folder}") as one, LiveSource(f"ipc://{folder}") as other:
        assert one.wait(lambda: one.status.state is SourceState.LIVE, WAIT_S)
        one.send(Control(action="pause", lease_s=60))
        assert other.wait(lambda: other.status.state is SourceState.PAUSED, WAIT_S)
        assert other.status.reason.startswith("by ")
        for source in (one, other):
            assert source.wait(lambda source=source: source.status.role == "operator", WAIT_S)  # type: ignore[misc]
        one.send(Control(action="resume"))
        assert other.wait(lambda: other.status.state is SourceState.LIVE, WAIT_S)


# Aborts


def test_abort_of_a_foreign_request_is_refused_unless_explicit(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.001)
    owner, stranger = new_client(), new_client()
    owner.wait_ready()
    owner.ask(submit("mine"), Accepted)
    assert "another client" in stranger.ask(Abort(request_id="mine"), Failed).reason
    owner.receive(Tokens)
    assert stranger.ask(Abort(request_id="nobody's"), Done).request_id == "nobody's"
    assert stranger.ask(Abort(request_id="mine", anyones=True), Done).request_id == "mine"
    assert owner.receive(Finished).finish_reason == "abort"


# Coming back


def test_returning_client_keeps_its_requests_without_losing_tokens(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.002)
    token = secrets.token_hex(16)
    first, second = new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    first.send(submit("mine", max_tokens=200, n=2))
    for _ in range(20):
        first.receive(Tokens)
    heard = [sum(isinstance(r, Tokens) and r.index == i for r in first.replies) for i in range(2)]
    first.dealer.close(linger=0)
    time.sleep(0.1)
    introduce(second, token, Awaited(request_id="mine", heard=tuple(heard)))
    for _ in range(2):
        assert second.receive(Finished).finish_reason == "length"
    for index in range(2):
        replies = [r for r in first.replies + second.replies if isinstance(r, Tokens) and r.index == index]
        assert len(replies) == 200
        assert [r.token_ids for r in replies] == sorted({r.token_ids for r in replies})
        assert not any(r.num_missed for r in replies)


def test_request_that_ended_meanwhile_is_reported_to_its_returning_client(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service()
    token = secrets.token_hex(16)
    first, second = new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    first.run(submit("done", max_tokens=3))
    first.dealer.close(linger=0)
    introduce(second, token, Awaited(request_id="done", heard=(1,)), Awaited(request_id="sent into the void"))
    assert second.receive(Finished).finish_reason == "length"
    assert len(received_tokens(second)) == 2
    refused = second.replies[-1] if isinstance(second.replies[-1], Refused) else second.receive(Refused)
    assert refused.reason == sessions.NEVER_RECEIVED


def test_request_awaited_by_a_returning_client_but_unknown_to_the_engine_is_ended(
    start_service: Callable[..., RunningService], client: Client
) -> None:
    """This happens after an engine restart that the client did not notice."""
    start_service()
    client.wait_ready()
    introduce(client, secrets.token_hex(16), Awaited(request_id="old", heard=(3, -1)))
    finished = client.receive(Finished)
    assert (finished.request_id, finished.index, finished.finish_reason) == ("old", 0, "error")
    assert finished.error == sessions.DROPPED


def test_requests_of_a_client_that_does_not_return_are_aborted(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "AWAY_S", 1.0)
    start_service(step_s=0.002)
    token = secrets.token_hex(16)
    first, watcher, late = new_client(), new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    first.ask(submit("mine"), Accepted)
    watcher.telemetry(Heartbeat, lambda beat: beat.num_unfinished == 1)
    first.dealer.close(linger=0)
    watcher.telemetry(Heartbeat, lambda beat: beat.num_unfinished == 0)
    introduce(late, token, Awaited(request_id="mine", heard=(0,)))
    assert late.receive(Finished).finish_reason == "abort"


def test_requests_of_a_returning_client_still_count_against_its_limits(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.002, limits=ServiceLimits(client_requests=Bound(3, MIB)))
    token = secrets.token_hex(16)
    first, second = new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    for name in ("one", "two"):
        first.ask(submit(name), Accepted)
    first.dealer.close(linger=0)
    introduce(second, token, Awaited(request_id="one", heard=(0,)), Awaited(request_id="two", heard=(0,)))
    second.ask(submit("three"), Accepted)
    assert "limit of 3 for a client" in second.ask(submit("four"), Refused).reason
    second.send(Abort(request_id="one"))
    assert second.receive(Finished).request_id == "one"
    second.ask(submit("five"), Accepted)


@pytest.mark.parametrize("is_noticed", [False, True])
def test_prompt_being_tokenized_belongs_to_its_returning_client(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client], is_noticed: bool
) -> None:
    start_service(prompt_s=2.0 if is_noticed else 0.5)
    token = secrets.token_hex(16)
    first, second = new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    first.send(Submit(request_id="mine", prompt="slow", sampling=SamplingParams(max_tokens=3)))
    if is_noticed:
        first.ask(Control(action="pause"), Done)
    else:
        first.ask(GetStatus(), Status)
    first.dealer.close(linger=0)
    if is_noticed:  # the client of a pause is monitored, so that the engine notices its end
        wait_for(lambda: not second.ask(GetStatus(), Status).paused)
    introduce(second, token, Awaited(request_id="mine"))
    assert second.receive((Accepted, Refused)).request_id == "mine"
    assert second.receive(Finished).finish_reason == "length"
    assert not [reply for reply in second.replies if isinstance(reply, Refused)]
    assert len(received_tokens(second)) == 3


def test_foreign_session_token_gives_no_access_to_requests(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client]
) -> None:
    start_service(step_s=0.002)
    owner, stranger = new_client(), new_client()
    owner.wait_ready()
    introduce(owner, secrets.token_hex(16))
    owner.ask(submit("mine"), Accepted)
    introduce(stranger, secrets.token_hex(16), Awaited(request_id="mine", heard=(0,)))
    assert stranger.receive(Finished).error == sessions.DROPPED
    assert not received_tokens(stranger)
    owner.receive(Tokens)


def test_retained_replies_are_bounded_and_missed_tokens_are_counted(
    start_service: Callable[..., RunningService], new_client: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_RETAINED_BYTES", 20_000)
    start_service()
    token = secrets.token_hex(16)
    first, second = new_client(), new_client()
    first.wait_ready()
    introduce(first, token)
    first.run(submit("mine", max_tokens=500))
    introduce(second, token, Awaited(request_id="mine", heard=(10,)))
    finished = second.receive(Finished)
    replies = [reply for reply in second.replies if isinstance(reply, Tokens)]
    assert 0 < len(replies) < 100
    assert replies[0].num_missed + len(replies) == 490
    assert not any(reply.num_missed for reply in replies[1:])
    assert finished.usage.completion_tokens == 500


def test_client_disconnected_for_not_reading_returns_and_gets_the_rest(
    start_service: Callable[..., RunningService], folder: Path
) -> None:
    site = start_service(step_s=0.002)
    replies: list[Reply] = []
    with LiveSource(f"ipc://{folder}") as source:

        def has(kind: type[Reply], count: int) -> bool:
            replies.extend(source.poll_replies())
            return sum(isinstance(reply, kind) for reply in replies) >= count

        assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)
        source.send(submit("mine", max_tokens=300))
        assert source.wait(lambda: has(Tokens, 20), WAIT_S), replies
        for client in set(site.service.sockets._spoke_last.values()):
            site.service.receiver.report_lost(client)  # like a connected client with too many waiting replies
        assert source.wait(lambda: has(Finished, 1), WAIT_S)
    ids = [i for reply in replies if isinstance(reply, Tokens) for i in reply.token_ids]
    assert ids == list(range(ids[0], ids[0] + 300))


def test_requests_of_a_client_that_closed_deliberately_are_aborted_at_once(
    start_service: Callable[..., RunningService], client: Client, folder: Path
) -> None:
    start_service(step_s=0.002)
    client.wait_ready()
    with LiveSource(f"ipc://{folder}") as source:
        source.send(submit("mine"))
        assert source.wait(lambda: any(isinstance(r, Tokens) for r in source.poll_replies()), WAIT_S)
    client.telemetry(Heartbeat, lambda beat: beat.num_unfinished == 0)


class CuttableProxy:
    """TCP proxy whose connections a test cuts."""

    def __init__(self, target_port: int, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self._target_port = target_port
        self._pairs: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for one in pairs:
            with contextlib.suppress(OSError):  # already disconnected
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self.listener.accept()
            except OSError:
                return
            try:
                theirs = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:  # the engine behind the proxy is gone
                ours.close()
                continue
            self._pairs += [ours, theirs]
            for pair in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass


@pytest.mark.usefixtures("_own_config")
def test_client_library_reconnects_over_a_cut_connection(start_service: Callable[..., RunningService]) -> None:
    site = start_service("tcp://127.0.0.1:0", step_s=0.002)
    port = int(site.service.telemetry_endpoint.rpartition(":")[2])
    cuts = _neighbours(port)
    try:
        ids, finish_reason = _stream_over(cuts)
    finally:
        for cut in cuts:
            cut.close()
    assert len(ids) == 400
    assert ids == list(range(ids[0], ids[0] + 400)), "a token was lost, repeated or out of order"
    assert finish_reason == "length"


def _stream_over(cuts: tuple[CuttableProxy, CuttableProxy]) -> tuple[list[int], str]:
    """Return the ids of 400 tokens and the finish reason, received while the connection is cut three times."""
    replies: list[Reply] = []
    with LiveSource(f"tcp://127.0.0.1:{cuts[0].port}") as source:

        def has(kind: type[Reply], count: int) -> bool:
            replies.extend(source.poll_replies())
            return sum(isinstance(reply, kind) for reply in replies) >= count

        assert source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)
        source.send(submit("mine", max_tokens=400))
        for count in (20, 60, 120):
            assert source.wait(lambda count=count: has(Tokens, count), WAIT_S)
            for cut in cuts:
                cut.cut()
        assert source.wait(lambda: has(Finished, 1), WAIT_S)
    ids = [i for reply in replies if isinstance(reply, Tokens) for i in reply.token_ids]
    last = next(reply for reply in replies if isinstance(reply, Finished))
    return ids, last.finish_reason


def _neighbours(port: int) -> tuple[CuttableProxy, CuttableProxy]:
    while True:
        first = CuttableProxy(port)
        try:
            return first, CuttableProxy(port + 1, first.port + 1)
        except OSError:
            first.close()


@pytest.fixture
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
