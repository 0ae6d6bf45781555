"""Fixtures: a fake engine without a model, a client with plain sockets, and processes that serve the engine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import zmq

from kvscope_telemetry.messages.commands import Command, Finished, GetStatus, Reply, Status, Submit, Tokens
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import decode_reply, decode_telemetry, encode

HERE = Path(__file__).parent
WAIT_MS = 60_000
_Message = TypeVar("_Message")


class PlainClient:
    """Sends commands, collects every reply, and receives telemetry on request."""

    def __init__(self, folder: Path) -> None:
        self.replies: list[Reply] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self._connect(zmq.DEALER, f"ipc://{folder}/command")
        self._subscriber = self._connect(zmq.SUB, f"ipc://{folder}/telemetry")
        self._subscriber.subscribe(b"")

    def send(self, command: Command) -> None:
        self.dealer.send(encode(command))

    def receive(
        self, kind: type[_Message] | tuple[type[_Message], ...], where: Callable[[_Message], bool] = lambda m: True
    ) -> _Message:
        """Return the next reply of this type; `replies` keeps the others too."""
        while True:
            reply = decode_reply(self.dealer.recv())
            self.replies.append(reply)
            if isinstance(reply, kind) and where(reply):
                return reply

    def ask(self, command: Command, kind: type[_Message]) -> _Message:
        self.send(command)
        return self.receive(kind)

    def telemetry(self, kind: type[_Message], where: Callable[[_Message], bool] = lambda m: True) -> _Message:
        """Return the next telemetry message of this type."""
        while True:
            message: TelemetryMessage = decode_telemetry(self._subscriber.recv())
            if isinstance(message, kind) and where(message):
                return message

    def wait_ready(self) -> Status:
        deadline = time.monotonic() + WAIT_MS / 1000
        while (status := self.ask(GetStatus(), Status)).phase == "loading":
            assert time.monotonic() < deadline, "it never got ready"
            time.sleep(0.005)
        return status

    def run(self, submit: Submit) -> tuple[list[Tokens], Finished]:
        """Submit, and return the tokens and the end of the request."""
        self.send(submit)
        first = len(self.replies)
        finished = self.receive(Finished, lambda f: f.request_id == submit.request_id)
        said = [r for r in self.replies[first:] if isinstance(r, Tokens)]
        return [tokens for tokens in said if tokens.request_id == submit.request_id], finished

    def close(self) -> None:
        self.dealer.close(linger=0)
        self._subscriber.close(linger=0)
        self._context.term()

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvtimeo = socket.sndtimeo = WAIT_MS
        socket.connect(endpoint)
        return socket


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, whatever the test's name."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def client(folder: Path) -> Iterator[PlainClient]:
    client = PlainClient(folder)
    yield client
    client.close()


@pytest.fixture
def new_client(folder: Path) -> Iterator[Callable[[], PlainClient]]:
    clients: list[PlainClient] = []

    def make() -> PlainClient:
        clients.append(PlainClient(folder))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_engine.py` next to this file."""
    spec = importlib.util.spec_from_file_location("fake_engine", HERE / "fake_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serving(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Function that starts a process serving a fake engine with the given options."""
    processes: list[subprocess.Popen[str]] = []

    def start(**options: Any) -> subprocess.Popen[str]:
        words = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(HERE / "fake_engine.py"), f"ipc://{folder}", *words]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()
