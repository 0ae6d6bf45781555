"""Keys on disk: created once, private, listed, removed, reloaded when they change, and refused if they are invalid."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from tests.processes import make_named_pipe

from kvscope_telemetry.credentials.key_files import read_client_key
from kvscope_telemetry.credentials.key_ring import KeyRing, default_keys_folder, read_allow_list
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.connections import (
    NO_KEY,
    Connection,
    connections_path,
    key_for,
    read_connections,
    remember,
)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


def test_key_files_are_readable_by_the_user_only(ring: KeyRing) -> None:
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in ring.folder.iterdir()}
    modes.pop(".lock", None)  # on systems that cannot lock a folder
    assert modes == {"engine.key": 0o600, "clients.toml": 0o600, "local.key": 0o600}


def test_local_desktop_key_exists_from_the_start(ring: KeyRing) -> None:
    own = read_client_key(ring.folder / "local.key")
    caller = ring.caller(own.public)
    assert caller is not None
    assert (caller.name, caller.role) == ("local", Role.OPERATOR)
    assert own.engine == ring.engine.public
    assert own.secret not in repr(own)


def test_restart_keeps_the_keys(ring: KeyRing) -> None:
    again = KeyRing(ring.folder)
    assert again.engine == ring.engine
    assert again.entries() == ring.entries()


def test_concurrent_starts_create_one_set_of_keys(tmp_path: Path) -> None:
    rings: list[KeyRing] = []
    threads = [threading.Thread(target=lambda: rings.append(KeyRing(tmp_path / "keys"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ring.engine.public for ring in rings}) == 1
    assert [len(ring.entries()) for ring in rings] == [1] * 6


def test_added_key_is_accepted_and_removed_key_is_not(ring: KeyRing, tmp_path: Path) -> None:
    other = KeyRing(ring.folder)
    key = other.new("laptop", Role.VIEWER, tmp_path / "laptop.key")
    assert read_client_key(tmp_path / "laptop.key") == key
    ring.refresh()
    caller = ring.caller(key.public)
    assert caller is not None
    assert caller.role is Role.VIEWER
    other.remove("laptop")
    ring.refresh()
    assert ring.caller(key.public) is None


def test_removed_local_key_is_not_created_again(ring: KeyRing) -> None:
    ring.remove("local")
    again = KeyRing(ring.folder)
    assert again.entries() == []
    assert not (ring.folder / "local.key").exists()


def test_new_engine_key_creates_a_new_local_key(ring: KeyRing) -> None:
    (ring.folder / "engine.key").unlink()
    again = KeyRing(ring.folder)
    own = read_client_key(ring.folder / "local.key")
    assert own.engine == again.engine.public != ring.engine.public
    assert again.caller(own.public) is not None


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65, 'q"', "ü", "a\n"])
def test_invalid_key_name_is_refused(ring: KeyRing, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="letters, digits"):
        ring.new(name, Role.VIEWER, tmp_path / "x.key")
    assert len(ring.entries()) == 1


def test_existing_key_name_or_file_is_not_overwritten(ring: KeyRing, tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    ring.new("a", Role.VIEWER, path)
    before = path.read_text()
    with pytest.raises(BadInput, match="name 'a' is in use"):
        ring.new("a", Role.OPERATOR, tmp_path / "other.key")
    with pytest.raises(BadInput, match="cannot be written: File exists"):
        ring.new("b", Role.OPERATOR, path)
    assert path.read_text() == before
    assert [entry.name for entry in ring.entries()] == ["local", "a"]


def test_removing_an_unknown_key_name_is_refused(ring: KeyRing) -> None:
    with pytest.raises(BadInput, match="'nobody' is not on the allow-list: local"):
        ring.remove("nobody")


@pytest.mark.parametrize("text", ["[[client", "client = 3", '[[client]]\nname = "a"', "\0", "client = [1]"])
def test_damaged_allow_list_admits_no_client_and_is_reported(ring: KeyRing, text: str) -> None:
    own = read_client_key(ring.folder / "local.key")
    path = ring.folder / "clients.toml"
    path.write_text(text)
    ring.refresh()
    assert ring.caller(own.public) is None
    with pytest.raises(BadInput, match=r"clients\.toml"):
        ring.entries()


def test_keys_folder_readable_by_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o755)  # whatever the umask is
    with pytest.raises(BadInput, match="chmod 700"):
        KeyRing(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file: give a folder"):
        KeyRing(tmp_path / "file")


def _key_text(**parts: str) -> str:
    good = {"name": "a", "role": "viewer", "public": "0" * 40, "secret": "0" * 40, "engine": "0" * 40} | parts
    return "[key]\n" + "".join(f'{name} = "{value}"\n' for name, value in good.items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"no \[key\] table"),
        ("key = 1", r"no \[key\] table"),
        ("[key", "not TOML"),
        (_key_text(public="x"), "public key is not 40"),
        (_key_text(secret="#" * 40), "secret key is not 40"),
        (_key_text(engine="~" * 40), "engine key is not 40"),
        (_key_text(role="root"), "viewer or operator"),
        (_key_text(name="a b"), "letters, digits"),
        ("x" * (2 << 20), "more than"),
    ],
)
def test_invalid_key_file_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(BadInput, match=reason) as error:
        read_client_key(path)
    assert "\n" not in str(error.value)
    assert "0" * 40 not in str(error.value), "the message must not contain key material"


def test_key_path_that_is_no_private_regular_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_text(_key_text())
    path.chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        read_client_key(path)
    with pytest.raises(BadInput, match="No such file"):
        read_client_key(tmp_path / "nothing")
    with pytest.raises(BadInput, match=r"Is a directory|not a plain file"):
        read_client_key(tmp_path)


def test_key_path_of_a_named_pipe_is_refused(tmp_path: Path) -> None:
    make_named_pipe(tmp_path / "pipe")
    with pytest.raises(BadInput, match="not a plain file"):
        read_client_key(tmp_path / "pipe")


# Which key goes where


def test_local_key_is_used_on_loopback_only() -> None:
    assert key_for("tcp://127.0.0.1:7710") is None
    ring = KeyRing()
    assert ring.folder == default_keys_folder()
    own = key_for("tcp://127.0.0.1:7710")
    assert own is not None
    assert own.name == "local"
    assert key_for("tcp://127.0.0.1:7710", NO_KEY) is None
    assert key_for("tcp://192.0.2.1:7710") is None
    assert key_for("ipc:///run/kv") is None


def test_remembered_key_takes_precedence_over_the_local_key(tmp_path: Path) -> None:
    ring = KeyRing()
    ring.new("a", Role.VIEWER, tmp_path / "a.key")
    ring.new("b", Role.VIEWER, connections_path().parent / "b.key")
    remember(Connection("tcp://127.0.0.1:1", str(tmp_path / "a.key"), 'a "box"\\ \x7f'))
    remember(Connection("tcp://127.0.0.1:2", "b.key"))
    remember(Connection("tcp://127.0.0.1:3"))
    remember(Connection("tcp://127.0.0.1:1", str(tmp_path / "a.key"), 'a "box"\\ \x7f'))
    first = read_connections()[0]
    assert (first.endpoint, first.label) == ("tcp://127.0.0.1:1", 'a "box"\\ \x7f')
    assert len(read_connections()) == 3
    names = [key.name for port in (1, 2, 3) if (key := key_for(f"tcp://127.0.0.1:{port}")) is not None]
    assert names == ["a", "b", "local"]


@pytest.mark.parametrize("text", ["[[connection", "connection = 3", "[[connection]]\nkey = 3", "[[connection]]"])
def test_damaged_connections_file_is_reported(text: str) -> None:
    connections_path().parent.mkdir(parents=True)
    connections_path().write_text(text)
    with pytest.raises(BadInput, match=r"connections\.toml is not accepted"):
        read_connections()


def test_unreadable_allow_list_is_reported_once_per_change(ring: KeyRing) -> None:
    received: list[str] = []
    path, mended = ring.folder / "clients.toml", (ring.folder / "clients.toml").read_text()
    path.write_text("no TOML [")
    another = KeyRing(ring.folder, warn=received.append)
    assert len(received) == 1, "at the start"
    assert "clients.toml is not accepted: it is not TOML" in received[0]
    assert "no client is allowed" in received[0]
    assert "\n" not in received[0]
    another.refresh()
    assert len(received) == 1
    path.write_text(mended)
    another.refresh()
    assert received[1:] == ["allow-list is read again"]
    path.chmod(0o644)
    another.refresh()
    assert "others can read it (fix: chmod 600)" in received[2]


def test_reading_the_allow_list_creates_no_files(tmp_path: Path) -> None:
    assert read_allow_list(tmp_path / "nowhere") == []
    assert list(tmp_path.iterdir()) == []
