"""Keys and roles over real sockets: who is admitted, what they may do, and what the others are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.simulated_engine.server import SimulatedServer

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    AllocatorMap,
    BlockText,
    Command,
    Control,
    Done,
    Failed,
    GetAllocatorMap,
    GetBlockText,
    Refused,
    Reply,
    Submit,
)
from kvscope_telemetry.messages.roles import UNKNOWN_KEY, Role
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.connections import NO_KEY

WAIT_S = 60.0
COMMANDS: dict[str, Command] = {
    "Submit": Submit(request_id="mine", prompt="hello"),
    "Abort": Abort(request_id="mine"),
    "GetBlockText": GetBlockText(blocks=(0,), tag=3),
    "shutdown": Control(action="shutdown", tag=3),
    "pause": Control(action="pause", tag=3),
    "resume": Control(action="resume", tag=3),
    "reset_prefix_cache": Control(action="reset_prefix_cache", tag=3),
}


class KeyedEngine:
    """An engine with keys on TCP, and its clients."""

    def __init__(self, folder: Path, endpoint: str, serve: Callable[..., SimulatedServer]) -> None:
        self.ring = KeyRing()
        self.endpoint = endpoint
        self.server = serve(endpoint, keys=self.ring)
        self._folder = folder
        self._sources: list[LiveSource] = []

    def key(self, name: str, role: Role) -> Path:
        path = self._folder / f"{name}.key"
        self.ring.new(name, role, path)
        return path

    def watch(self, key: Path | None = None) -> LiveSource:
        self._sources.append(LiveSource(self.endpoint, key=key))
        return self._sources[-1]

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def site(
    tmp_path: Path, make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]
) -> Iterator[KeyedEngine]:
    site = KeyedEngine(tmp_path, make_endpoint("tcp"), serve)
    yield site
    site.close()


def wait_for_frames(source: LiveSource) -> None:
    before = source.status.frames_received
    assert source.wait(lambda: source.status.frames_received > before + 3, WAIT_S), source.status


def wait_for_state(source: LiveSource, state: SourceState) -> str:
    assert source.wait(lambda: source.status.state is state, WAIT_S), source.status
    return source.status.reason


def ask(source: LiveSource, command: Command, kind: tuple[type[Reply], ...]) -> Reply:
    source.send(command)
    replies: list[Reply] = []

    def has_answer() -> bool:
        replies.extend(source.poll_replies())
        return any(isinstance(reply, kind) for reply in replies)

    assert source.wait(has_answer, WAIT_S), replies
    return next(reply for reply in replies if isinstance(reply, kind))


def test_local_user_is_operator_without_configuration(site: KeyedEngine) -> None:
    source = site.watch()
    wait_for_frames(source)
    assert source.wait(lambda: source.status.role == "operator", WAIT_S)
    assert isinstance(ask(source, COMMANDS["Submit"], (Accepted, Refused)), Accepted)
    assert isinstance(ask(source, COMMANDS["GetBlockText"], (BlockText, Failed)), BlockText)
    assert isinstance(ask(source, COMMANDS["pause"], (Done, Failed)), Done)
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Done)


@pytest.mark.parametrize("name", COMMANDS)
def test_viewer_sees_everything_and_is_refused_all_commands(site: KeyedEngine, name: str) -> None:
    source = site.watch(site.key("guest", Role.VIEWER))
    wait_for_frames(source)
    assert source.wait(lambda: source.update_mirror() is not None, WAIT_S)
    assert source.wait(lambda: source.status.role == "viewer", WAIT_S)
    reply = ask(source, COMMANDS[name], (Refused, Failed, Done, Accepted, BlockText))
    assert isinstance(reply, Refused | Failed)
    assert "is for operators: 'guest' is a viewer" in reply.reason
    if isinstance(reply, Refused):
        assert reply.request_id == "mine"
    wait_for_frames(source)


def test_viewer_may_request_the_allocator_map(site: KeyedEngine) -> None:
    source = site.watch(site.key("guest", Role.VIEWER))
    wait_for_frames(source)
    assert isinstance(ask(source, GetAllocatorMap(tag=8), (AllocatorMap, Failed)), AllocatorMap)


def test_unknown_key_is_reported(site: KeyedEngine, tmp_path: Path) -> None:
    key = site.key("gone", Role.OPERATOR)
    site.ring.remove("gone")
    time.sleep(0.3)
    source = site.watch(key)
    reason = wait_for_state(source, SourceState.REFUSED)
    assert reason == f"the engine at {site.endpoint} does not know this key ('gone')"
    assert source.status.frames_received == 0


def test_missing_key_is_reported_with_the_option(site: KeyedEngine) -> None:
    source = site.watch(NO_KEY)
    reason = wait_for_state(source, SourceState.REFUSED)
    assert "--key FILE" in reason
    assert source.status.frames_received == 0


def test_key_of_another_engine_is_reported(site: KeyedEngine, tmp_path: Path) -> None:
    KeyRing(tmp_path / "others").new("x", Role.OPERATOR, tmp_path / "x.key")
    source = site.watch(tmp_path / "x.key")
    reason = wait_for_state(source, SourceState.REFUSED)
    assert "another engine's key" in reason


def test_self_made_key_with_the_engine_public_key_is_refused(site: KeyedEngine, tmp_path: Path) -> None:
    """The engine's public key is not a password."""
    other = KeyRing(tmp_path / "others").new("x", Role.OPERATOR, tmp_path / "x.key")
    forged = (tmp_path / "x.key").read_text().replace(other.engine, site.ring.engine.public)
    (tmp_path / "x.key").write_text(forged)
    assert "does not know this key" in wait_for_state(site.watch(tmp_path / "x.key"), SourceState.REFUSED)


def test_edited_name_and_role_in_the_key_file_change_nothing(site: KeyedEngine) -> None:
    path = site.key("guest", Role.VIEWER)
    path.write_text(path.read_text().replace("viewer", "operator").replace('"guest"', '"local"'))
    source = site.watch(path)
    reply = ask(source, COMMANDS["pause"], (Done, Failed))
    assert isinstance(reply, Failed)
    assert "'guest' is a viewer" in reply.reason


def test_client_is_admitted_once_its_key_is_added(site: KeyedEngine, tmp_path: Path) -> None:
    key = site.key("late", Role.VIEWER)
    entries = (site.ring.folder / "clients.toml").read_text()
    site.ring.remove("late")
    time.sleep(0.3)
    source = site.watch(key)
    wait_for_state(source, SourceState.REFUSED)
    (site.ring.folder / "clients.toml").write_text(entries)
    wait_for_frames(source)
    assert wait_for_state(source, SourceState.LIVE) == ""


def test_client_with_a_removed_key_is_disconnected_and_others_stay(site: KeyedEngine) -> None:
    own, guest = site.watch(), site.watch(site.key("guest", Role.OPERATOR))
    for source in (own, guest):
        wait_for_frames(source)
    KeyRing().remove("guest")  # as `kvscope-engine keys remove` does, in another process
    deadline = time.monotonic() + WAIT_S
    while isinstance(reply := ask(guest, Control(action="pause", tag=9), (Done, Failed)), Done):
        assert time.monotonic() < deadline, "the list is looked at a few times a second"
        time.sleep(0.05)
    assert isinstance(reply, Failed)
    # The connection is closed as well, sometimes before the reason arrives.
    assert reply.reason in (UNKNOWN_KEY, "the engine does not answer")
    site.server.release()
    assert "does not know this key" in wait_for_state(guest, SourceState.REFUSED)
    while _receives_frames(guest):  # what was on its way
        assert time.monotonic() < deadline, "its telemetry ended"
    wait_for_frames(own)
    own.update_mirror()
    wait_for_state(own, SourceState.LIVE)
    subscribers = site.server.sockets._subscribers
    assert own.wait(lambda: len(subscribers) == 1, WAIT_S), "the newly opened socket must be watched too"


def test_changed_role_applies_immediately(site: KeyedEngine) -> None:
    source = site.watch(site.key("guest", Role.OPERATOR))
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Done)
    path = site.ring.folder / "clients.toml"
    before, _, after = path.read_text().rpartition("operator")
    path.write_text(before + "viewer" + after)
    site.ring.refresh()
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Failed)


def test_loopback_without_keys_is_view_only(
    make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]
) -> None:
    serve(endpoint := make_endpoint("tcp"), keyless=Role.VIEWER)
    with LiveSource(endpoint) as source:
        wait_for_frames(source)
        assert isinstance(ask(source, COMMANDS["shutdown"], (Done, Failed)), Failed)
    KeyRing()
    with LiveSource(endpoint) as source:
        assert "--key none" in wait_for_state(source, SourceState.REFUSED)
    with LiveSource(endpoint, key=NO_KEY) as source:
        wait_for_frames(source)


def test_ipc_owner_is_operator(make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]) -> None:
    serve(endpoint := make_endpoint("ipc"), keys=KeyRing(), keyless=Role.VIEWER)
    with LiveSource(endpoint) as source:
        wait_for_frames(source)
        assert isinstance(ask(source, COMMANDS["GetBlockText"], (BlockText, Failed)), BlockText)


def _receives_frames(source: LiveSource) -> bool:
    before = source.status.frames_received
    time.sleep(0.3)
    return source.status.frames_received > before
