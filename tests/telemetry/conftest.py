"""Fixtures: endpoints, simulated engines on real sockets, a proxy that loses chosen messages, and recordings."""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.operating_system import HAS_UNIX_SOCKETS, fcntl
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.endpoints import endpoints

collect_ignore = (
    []
    if find_spec("starlette") and fcntl is not None
    else ["collectors/prompting/test_own_server.py", "metrics/test_metrics_of_api_server.py"]
)
"""Files that test the API server, which is missing without the engine, and the engine needs Linux."""
REQUEST_FIELDS = (
    "number",
    "state",
    "arrival_ns",
    "num_prompt_tokens",
    "max_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_blocks",
)
WAIT_S = 60.0
"""Timeout of every wait. Passing tests never wait this long."""


@pytest.fixture(autouse=True)
def _isolated_config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither read nor write the keys and connections of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def make_endpoint() -> Iterator[Callable[[str], str]]:
    """Function that returns an unused endpoint: `make_endpoint("ipc" or "tcp")`, tcp on Windows."""
    folders: list[str] = []

    def make(kind: str = "ipc") -> str:
        if kind == "tcp" or not HAS_UNIX_SOCKETS:
            return f"tcp://127.0.0.1:{_free_port_pair()}"
        folders.append(tempfile.mkdtemp(prefix="kvscope-"))  # short: a socket path has 107 bytes at most
        return f"ipc://{folders[-1]}/telemetry"

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def serve() -> Iterator[Callable[..., SimulatedServer]]:
    """Function that serves a simulated engine on real sockets: `serve(endpoint, rate=…, **engine options)`."""
    servers: list[SimulatedServer] = []

    def start(
        endpoint: str,
        *,
        rate: float = 300.0,
        keys: KeyRing | None = None,
        keyless: Role = Role.OPERATOR,
        **options: int,
    ) -> SimulatedServer:
        engine = SimulatedEngine(**{"num_blocks": 2000, **options})  # type: ignore[arg-type]
        servers.append(SimulatedServer(engine, endpoint, rate=rate, keys=keys, keyless=keyless))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def watch() -> Iterator[Callable[..., LiveSource]]:
    """Function that opens a live source: `watch(endpoint)`."""
    sources: list[LiveSource] = []

    def start(endpoint: str, **options: Any) -> LiveSource:
        sources.append(LiveSource(endpoint, **options))
        return sources[-1]

    yield start
    for source in sources:
        source.close()


class Proxy:
    """Proxy between an engine and a client. `treat` maps each telemetry message to those passed on, `answer` each
    reply to another.
    """

    def __init__(
        self,
        engine: str,
        client: str,
        treat: Callable[[bytes], list[bytes]],
        answer: Callable[[bytes], bytes] = lambda reply: reply,
    ) -> None:
        self._treat, self._answer = treat, answer
        self._addresses = endpoints(engine), endpoints(client)
        self._closing = threading.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(WAIT_S)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        engine, client = self._addresses
        with zmq.Context() as context:
            sub, pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
            dealer, router = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
            sub.subscribe(b"")
            sub.rcvhwm = pub.sndhwm = 100_000
            sub.connect(engine.telemetry)
            dealer.connect(engine.command)
            pub.bind(client.telemetry)
            router.bind(client.command)
            self._is_up.set()
            self._forward(sub, pub, dealer, router)
            for each in (sub, pub, dealer, router):
                each.close(linger=0)

    def _forward(
        self,
        sub: zmq.Socket[bytes],
        pub: zmq.Socket[bytes],
        dealer: zmq.Socket[bytes],
        router: zmq.Socket[bytes],
    ) -> None:
        poller = zmq.Poller()
        for each in (sub, dealer, router):
            poller.register(each, zmq.POLLIN)
        identity = b""
        while not self._closing.is_set():
            ready = dict(poller.poll(20))
            if sub in ready:
                for data in self._treat(sub.recv()):
                    pub.send(data)
            if router in ready:
                identity, command = router.recv_multipart()
                dealer.send(command)
            if dealer in ready:
                router.send_multipart([identity, self._answer(dealer.recv())])


@pytest.fixture
def proxy(make_endpoint: Callable[[str], str]) -> Iterator[Callable[..., str]]:
    """Function that returns the endpoint of a proxy: `proxy(engine_endpoint, treat, answer)`."""
    proxies: list[Proxy] = []

    def start(engine: str, treat: Callable[[bytes], list[bytes]], *answer: Callable[[bytes], bytes]) -> str:
        client = make_endpoint("ipc")
        proxies.append(Proxy(engine, client, treat, *answer))
        return client

    yield start
    for each in proxies:
        each.close()


@pytest.fixture
def assert_mirrors() -> Callable[..., None]:
    """Function that pauses the engine, lets the source catch up and compares all state: `assert_mirrors(source,
    server)`.
    """

    def check(source: LiveSource, server: SimulatedServer, *, go_on: bool = True) -> None:
        server.hold()
        engine, mirror = server.engine, source.mirror
        caught_up = source.wait(lambda: _follow(source, engine), WAIT_S)
        assert caught_up, f"at {mirror.epoch}/{mirror.seq} of {engine.hello.epoch}/{engine.seq}, {source.status}"
        assert mirror.ledger.differences(engine.ledger) == []
        assert_same_requests(mirror, engine)
        counts = np.bincount(engine.ledger.state, minlength=3)
        assert [mirror.num_free, mirror.num_active, mirror.num_cached] == counts.tolist()
        if go_on:
            server.release()

    return check


def _follow(source: LiveSource, engine: SimulatedEngine) -> bool:
    source.update_mirror()
    return (source.mirror.epoch, source.mirror.seq) == (engine.hello.epoch, engine.seq)


def assert_same_requests(mirror: Mirror, engine: SimulatedEngine) -> None:
    """Check that the mirror's unfinished requests equal those of the engine in all fields and blocks."""
    truth = Mirror()
    truth.reset(engine.snapshot())
    going_on = mirror.requests.state != RequestState.FINISHED
    for name in REQUEST_FIELDS:
        np.testing.assert_array_equal(
            getattr(mirror.requests, name)[going_on], getattr(truth.requests, name), err_msg=name
        )
    for number in truth.requests.number.tolist():
        assert mirror.requests.request_id(number) == truth.requests.request_id(number)
        np.testing.assert_array_equal(mirror.requests.table(number), truth.requests.table(number))


@pytest.fixture
def same_requests() -> Callable[[Mirror, SimulatedEngine], None]:
    """The function `assert_same_requests`, for tests without sockets."""
    return assert_same_requests


def _free_port_pair() -> int:
    """Return a port that is free together with the next one, and is outside of the range that systems assign to
    clients.
    """
    choose = random.SystemRandom()  # tests that run in parallel share the seed of `random`
    while True:
        with socket.socket() as first, socket.socket() as second:
            port = choose.randrange(20_000, 32_000, 2)
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


# Recordings of a simulated engine with its own clock, and the messages they were written from.

STEP_NS = 20_000_000


class SteppedClock:
    """Clock that advances by 20 ms per frame."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        self.now_ns += STEP_NS
        return self.now_ns


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording file and the messages in it."""

    path: Path
    messages: list[TelemetryMessage]

    @property
    def frames(self) -> list[Frame]:
        return [message for message in self.messages if isinstance(message, Frame)]

    def mirror_after(self, num_messages: int) -> Mirror:
        follower = Follower()
        for message in self.messages[:num_messages]:
            follower.feed(message)
        follower.apply_pending()
        return follower.mirror


def simulated_messages(
    num_frames: int, *, num_blocks: int = 400, epoch: int = 1, seed: int = 0
) -> list[TelemetryMessage]:
    """Return a hello, a snapshot and frames of a simulated engine."""
    clock = SteppedClock()
    engine = SimulatedEngine(num_blocks=num_blocks, num_running=8, epoch=epoch, seed=seed, clock=clock)
    return [engine.hello, engine.snapshot(), *(engine.advance() for _ in range(num_frames))]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recorded]:
    """Function that writes a recording with one keyframe per second: `record(num_frames or messages)`."""

    def make(what: int | list[TelemetryMessage] = 300, name: str = "session.mcap", **options: int) -> Recorded:
        return record_in(tmp_path, what, name, **options)

    return make


def record_in(folder: Path, what: int | list[TelemetryMessage], name: str, **options: int) -> Recorded:
    """Write a recording like `record`, into a folder that several tests may share."""
    messages = simulated_messages(what) if isinstance(what, int) else what
    with RecordingWriter(folder / name, **{"keyframe_interval_ns": 1_000_000_000, **options}) as writer:
        for message in messages:
            writer.write(message, wait=True)
    assert writer.num_dropped == 0
    return Recorded(writer.path, messages)


@pytest.fixture
def make_messages() -> Callable[..., list[TelemetryMessage]]:
    """The function `simulated_messages`."""
    return simulated_messages


@pytest.fixture
def assert_same_state() -> Callable[[Mirror, Mirror], None]:
    """Function that compares two mirrors except for ended requests, which a keyframe does not contain."""

    def check(left: Mirror, right: Mirror) -> None:
        assert (left.epoch, left.seq, left.step, left.time_ns) == (right.epoch, right.seq, right.step, right.time_ns)
        assert left.ledger.differences(right.ledger) == []
        assert left.counters == right.counters
        columns = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
        assert equal_requests(_unfinished_requests(left), _unfinished_requests(right), columns)

    return check


def _unfinished_requests(mirror: Mirror):  # type: ignore[no-untyped-def]
    requests = mirror.requests
    requests._select_rows((requests.state != RequestState.FINISHED).nonzero()[0])
    return requests
