"""Keys and roles over real sockets: who gets in, who may do what, and what those are told who may not."""

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


class Site:
    """An engine with keys on tcp, and those who want something of it."""

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
def site(tmp_path: Path, make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]) -> Iterator[Site]:
    site = Site(tmp_path, make_endpoint("tcp"), serve)
    yield site
    site.close()


def sees_frames(source: LiveSource) -> None:
    before = source.status.frames_received
    assert source.wait(lambda: source.status.frames_received > before + 3, WAIT_S), source.status


def is_in_state(source: LiveSource, state: SourceState) -> str:
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


def test_the_user_s_own_client_is_operator_without_a_word(site: Site) -> None:
    source = site.watch()
    sees_frames(source)
    assert source.wait(lambda: source.status.role == "operator", WAIT_S)
    assert isinstance(ask(source, COMMANDS["Submit"], (Accepted, Refused)), Accepted)
    assert isinstance(ask(source, COMMANDS["GetBlockText"], (BlockText, Failed)), BlockText)
    assert isinstance(ask(source, COMMANDS["pause"], (Done, Failed)), Done)
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Done)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_viewer_sees_everything_and_is_refused_the_rest(site: Site, name: str) -> None:
    source = site.watch(site.key("guest", Role.VIEWER))
    sees_frames(source)
    assert source.wait(lambda: source.update_mirror() is not None, WAIT_S)
    assert source.wait(lambda: source.status.role == "viewer", WAIT_S)
    reply = ask(source, COMMANDS[name], (Refused, Failed, Done, Accepted, BlockText))
    assert isinstance(reply, Refused | Failed)
    assert "is for operators: 'guest' is a viewer" in reply.reason
    if isinstance(reply, Refused):
        assert reply.request_id == "mine"
    sees_frames(source)


def test_a_viewer_may_ask_how_the_memory_is_divided(site: Site) -> None:
    source = site.watch(site.key("guest", Role.VIEWER))
    sees_frames(source)
    assert isinstance(ask(source, GetAllocatorMap(tag=8), (AllocatorMap, Failed)), AllocatorMap)


def test_an_unknown_key_is_told(site: Site, tmp_path: Path) -> None:
    key = site.key("gone", Role.OPERATOR)
    site.ring.remove("gone")
    time.sleep(0.3)
    source = site.watch(key)
    reason = is_in_state(source, SourceState.REFUSED)
    assert reason == f"the engine at {site.endpoint} does not know this key ('gone')"
    assert source.status.frames_received == 0


def test_who_has_no_key_is_told_so(site: Site) -> None:
    source = site.watch(NO_KEY)
    reason = is_in_state(source, SourceState.REFUSED)
    assert "--key FILE" in reason
    assert source.status.frames_received == 0


def test_a_key_of_another_engine_is_told(site: Site, tmp_path: Path) -> None:
    KeyRing(tmp_path / "others").new("x", Role.OPERATOR, tmp_path / "x.key")
    source = site.watch(tmp_path / "x.key")
    reason = is_in_state(source, SourceState.REFUSED)
    assert "another engine's key" in reason


def test_one_s_own_random_key_does_not_help(site: Site, tmp_path: Path) -> None:
    """Knowing the engine's public key is not enough: it is no password."""
    other = KeyRing(tmp_path / "others").new("x", Role.OPERATOR, tmp_path / "x.key")
    forged = (tmp_path / "x.key").read_text().replace(other.engine, site.ring.engine.public)
    (tmp_path / "x.key").write_text(forged)
    assert "does not know this key" in is_in_state(site.watch(tmp_path / "x.key"), SourceState.REFUSED)


def test_a_key_s_name_and_role_in_the_file_change_nothing(site: Site) -> None:
    path = site.key("guest", Role.VIEWER)
    path.write_text(path.read_text().replace("viewer", "operator").replace('"guest"', '"local"'))
    source = site.watch(path)
    reply = ask(source, COMMANDS["pause"], (Done, Failed))
    assert isinstance(reply, Failed)
    assert "'guest' is a viewer" in reply.reason


def test_a_key_made_while_somebody_knocks_lets_in(site: Site, tmp_path: Path) -> None:
    key = site.key("late", Role.VIEWER)
    entries = (site.ring.folder / "clients.toml").read_text()
    site.ring.remove("late")
    time.sleep(0.3)
    source = site.watch(key)
    is_in_state(source, SourceState.REFUSED)
    (site.ring.folder / "clients.toml").write_text(entries)
    sees_frames(source)
    assert is_in_state(source, SourceState.LIVE) == ""


def test_a_removed_key_is_cut_off_and_the_others_go_on(site: Site) -> None:
    own, guest = site.watch(), site.watch(site.key("guest", Role.OPERATOR))
    for source in (own, guest):
        sees_frames(source)
    KeyRing().remove("guest")  # as `kvscope-engine keys remove` does, in another process
    deadline = time.monotonic() + WAIT_S
    while isinstance(reply := ask(guest, Control(action="pause", tag=9), (Done, Failed)), Done):
        assert time.monotonic() < deadline, "the list is looked at a few times a second"
        time.sleep(0.05)
    assert isinstance(reply, Failed)
    # Its connection is cut as well, at times before it is told.
    assert reply.reason in (UNKNOWN_KEY, "the engine does not answer")
    site.server.release()
    assert "does not know this key" in is_in_state(guest, SourceState.REFUSED)
    while _hears(guest):  # what was on its way
        assert time.monotonic() < deadline, "its telemetry ended"
    sees_frames(own)
    own.update_mirror()
    is_in_state(own, SourceState.LIVE)
    subscribers = site.server.sockets._subscribers
    assert own.wait(lambda: len(subscribers) == 1, WAIT_S), "the socket that was opened anew is watched too"


def test_a_role_that_changed_holds_at_once(site: Site) -> None:
    source = site.watch(site.key("guest", Role.OPERATOR))
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Done)
    path = site.ring.folder / "clients.toml"
    before, _, after = path.read_text().rpartition("operator")
    path.write_text(before + "viewer" + after)
    site.ring.refresh()
    assert isinstance(ask(source, COMMANDS["resume"], (Done, Failed)), Failed)


def test_without_keys_loopback_sees_and_does_nothing(
    make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]
) -> None:
    serve(endpoint := make_endpoint("tcp"), keyless=Role.VIEWER)
    with LiveSource(endpoint) as source:
        sees_frames(source)
        assert isinstance(ask(source, COMMANDS["shutdown"], (Done, Failed)), Failed)
    KeyRing()
    with LiveSource(endpoint) as source:
        assert "--key none" in is_in_state(source, SourceState.REFUSED)
    with LiveSource(endpoint, key=NO_KEY) as source:
        sees_frames(source)


def test_ipc_is_for_its_owner_who_may_do_all(
    make_endpoint: Callable[[str], str], serve: Callable[..., SimulatedServer]
) -> None:
    serve(endpoint := make_endpoint("ipc"), keys=KeyRing(), keyless=Role.VIEWER)
    with LiveSource(endpoint) as source:
        sees_frames(source)
        assert isinstance(ask(source, COMMANDS["GetBlockText"], (BlockText, Failed)), BlockText)


def _hears(source: LiveSource) -> bool:
    before = source.status.frames_received
    time.sleep(0.3)
    return source.status.frames_received > before
