"""Keys of an engine: its key pair, and the allow-list of its clients, in a directory accessible to this user only.

    engine.key      the engine's CURVE keys, created on first use
    clients.toml    allowed clients: a [[client]] with name, role and public key each
    local.key       key file of this user's desktop on this machine, created together with engine.key

Owns the files in the directory, and reloads the allow-list after a change. Must not depend on sockets. Methods may be
called from any thread. A lock on the directory (flock) ensures that one process at a time changes the allow-list.
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import zmq

from kvscope_telemetry import operating_system
from kvscope_telemetry.credentials.key_files import (
    ClientKey,
    EngineKey,
    checked_key,
    checked_name,
    checked_role,
    read_engine_key,
    write_client_key,
    write_engine_key,
)
from kvscope_telemetry.credentials.private_files import make_private_folder, read_private, write_private
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Caller, Role

LOCAL: Final = "local"
"""Name of the key that is created for the desktop of the engine's user."""
LOCAL_KEY: Final = f"{LOCAL}.key"
MAX_CLIENTS: Final = 1000
RECHECK_INTERVAL_S: Final = 0.2
_WHAT: Final = "keys folder"
_LIST: Final = "allow-list"
_HEADER: Final = (
    "# kvscope: whom the engine lets in. `kvscope-engine keys` writes this file; engines read it as it changes.\n"
)


@dataclass(frozen=True, slots=True)
class ClientEntry:
    name: str
    role: Role
    public: str
    made: str = ""
    """Date of creation in ISO 8601."""


def default_keys_folder() -> Path:
    return config_folder() / "keys"


def config_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kvscope"


def local_key() -> Path | None:
    """Return the key file that an engine of this user created for the desktop; None if there is none."""
    path = default_keys_folder() / LOCAL_KEY
    return path if path.is_file() else None


def read_allow_list(folder: Path) -> list[ClientEntry]:
    """Return the allow-list in `folder`, without creating anything. Raises BadInput if it cannot be read."""
    path = folder / "clients.toml"
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{_WHAT} {folder} is a file: give a folder")
    try:
        if not path.exists():
            return []
        tables = tomllib.loads(read_private(path, _LIST)).get("client", [])
    except OSError as error:
        raise BadInput(f"{_LIST} {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{_LIST} {path} is not accepted: it is not TOML: {error}") from None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadInput(f"{_LIST} {path} is not accepted: [[client]] tables are expected")
    return [_entry(table, path) for table in tables]


class KeyRing:
    """Keys of an engine in `folder`, created if they do not exist. Raises BadInput if other users can access the
    directory.

    `warn` is called with one line, on any thread, when the allow-list cannot be read, and when it is readable again.
    """

    def __init__(self, folder: Path | None = None, *, warn: Callable[[str], None] | None = None) -> None:
        self._warn = warn or (lambda line: None)
        self._trouble = ""
        self.folder = folder or default_keys_folder()
        make_private_folder(self.folder, _WHAT)
        with self._locked():
            self.engine = self._engine_key()
        self._file_stamp: tuple[int, ...] = ()
        self._refreshed_s = 0.0
        self._callers: Mapping[str, Caller] = {}
        self.refresh()

    def caller(self, public: str) -> Caller | None:
        """Return the client with this public key (Z85); None if the key is not on the current allow-list."""
        if public not in self._callers or time.monotonic() - self._refreshed_s >= RECHECK_INTERVAL_S:
            self.refresh()
        return self._callers.get(public)

    def refresh(self) -> None:
        """Reload the allow-list if the file changed. While it cannot be read, no client is allowed."""
        self._refreshed_s = time.monotonic()
        stamp = _file_stamp(self.folder / "clients.toml")
        if stamp == self._file_stamp:
            return
        self._file_stamp = stamp
        entries, trouble = list[ClientEntry](), ""
        try:
            entries = self.entries()
        except BadInput as error:
            trouble = str(error)
        if trouble != self._trouble:
            self._trouble = trouble
            self._warn(f"{trouble}; no client is allowed until it is fixed" if trouble else f"{_LIST} is read again")
        self._callers = {entry.public: Caller(entry.name, entry.role, entry.public) for entry in entries}

    def entries(self) -> list[ClientEntry]:
        """Return the current allow-list. Raises BadInput if it cannot be read."""
        return read_allow_list(self.folder)

    def new(self, name: str, role: Role, out: Path) -> ClientKey:
        """Create a key for a client, write its file, and add it to the allow-list.

        Raises BadInput if the name is in use or the file exists.
        """
        checked_name(name)
        with self._locked():
            return self._new(name, role, out)

    def remove(self, name: str) -> ClientEntry:
        """Remove the client `name` from the allow-list and return it. Raises BadInput if the list has no such name."""
        with self._locked():
            entries = self.entries()
            removed = next((entry for entry in entries if entry.name == name), None)
            if removed is None:
                names = ", ".join(entry.name for entry in entries) or "nobody"
                raise BadInput(f"name {name!r:.80} is not on the allow-list: {names}")
            self._write([entry for entry in entries if entry is not removed])
            if name == LOCAL:
                (self.folder / LOCAL_KEY).unlink(missing_ok=True)
        return removed

    def _new(self, name: str, role: Role, out: Path) -> ClientKey:
        entries = self.entries()
        if any(entry.name == name for entry in entries):
            raise BadInput(f"name {name!r} is in use: remove that key first, or choose another name")
        if len(entries) >= MAX_CLIENTS:
            raise BadInput(f"the allow-list is full: {MAX_CLIENTS} keys")
        public, secret = (key.decode() for key in zmq.curve_keypair())
        key = ClientKey(name, role, public, secret, self.engine.public)
        write_client_key(out, key)
        today = datetime.now(UTC).date().isoformat()
        self._write([*entries, ClientEntry(name, role, public, today)])
        return key

    def _write(self, entries: list[ClientEntry]) -> None:
        write_private(self.folder / "clients.toml", _HEADER + "".join(map(_table, entries)), _LIST)

    def _engine_key(self) -> EngineKey:
        path, is_first = self.folder / "engine.key", not (self.folder / "clients.toml").exists()
        if not path.exists():
            public, secret = (key.decode() for key in zmq.curve_keypair())
            write_engine_key(path, EngineKey(public, secret))
            is_first = True
        self.engine = read_engine_key(path)
        if is_first:  # only then: a local key that the user removed is not created again
            self._make_local_key()
        return self.engine

    def _make_local_key(self) -> None:
        path = self.folder / LOCAL_KEY
        path.unlink(missing_ok=True)
        self._write([entry for entry in self.entries() if entry.name != LOCAL])
        self._new(LOCAL, Role.OPERATOR, path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = operating_system.open_for_lock(self.folder)
        except OSError as error:
            raise BadInput(f"{_WHAT} {self.folder} is not accepted: {error.strerror}") from None
        try:
            operating_system.lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)


def _entry(table: Mapping[str, object], path: Path) -> ClientEntry:
    where = f"{_LIST} {path}"
    made = table.get("made", "")
    public = checked_key(table.get("public"), where, "public")
    made = "".join(c for c in str(made) if c.isascii() and c.isprintable() and c not in '"\\')[:32]
    return ClientEntry(checked_name(table.get("name")), checked_role(table.get("role")), public, made)


def _table(entry: ClientEntry) -> str:
    fields = {"name": entry.name, "role": entry.role, "public": entry.public, "made": entry.made}
    return "\n[[client]]\n" + "".join(f'{name} = "{value}"\n' for name, value in fields.items())


def _file_stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return (-1,)
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
