"""Parses and checks an `--endpoint` to listen on, before any socket exists.

`ipc:///dir` and `ipc:///dir/telemetry` are equivalent: sockets `telemetry` and `command` in that directory.
`tcp://HOST:PORT` uses PORT for telemetry and PORT + 1 for commands; port 0 selects any free pair.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput

MAX_IPC_PATH_BYTES = 107
"""Maximum length of a unix socket's path on Linux, without the terminating zero."""


@dataclass(frozen=True, slots=True)
class IpcAddress:
    folder: Path

    @property
    def telemetry(self) -> str:
        return f"ipc://{self.folder}/telemetry"

    @property
    def command(self) -> str:
        return f"ipc://{self.folder}/command"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Two consecutive ports of a network interface; `host` is in ZeroMQ's notation, with brackets around IPv6."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


DEFAULT_PORT: Final = 7710
"""Port of the default endpoint on systems without Unix sockets."""


def default_endpoint() -> str:
    """Return the default endpoint, which is in the user's runtime directory. Only one engine per user can have it.

    Without Unix sockets, it is a port of this machine.
    """
    return f"ipc://{runtime_folder()}" if operating_system.HAS_UNIX_SOCKETS else f"tcp://127.0.0.1:{DEFAULT_PORT}"


def runtime_folder() -> Path:
    """Return the user's directory for files that are not needed after the process ends."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return runtime / "kvscope" if _supports_sockets(runtime, "kvscope/devices") else operating_system.shared_folder()


def folder_for_sockets(prefix: str) -> Path:
    """Return the directory in which the caller creates a private subdirectory for sockets. The name of the subdirectory
    will be `prefix` and 8 letters.

    The user's runtime directory is preferred, then the temporary directory, then /tmp. Directories that do not exist,
    are not writable or have a path too long for a socket are skipped.
    """
    folders = (Path(os.environ.get("XDG_RUNTIME_DIR", "")), Path(tempfile.gettempdir()))
    return next((folder for folder in folders if _supports_sockets(folder, f"{prefix}12345678")), Path("/tmp"))


def _supports_sockets(folder: Path, name: str) -> bool:
    is_short = len(os.fsencode(folder / name / "telemetry")) <= MAX_IPC_PATH_BYTES
    return folder.is_absolute() and is_short and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def parse_bind_address(endpoint: str) -> IpcAddress | TcpAddress:
    """Return the address in `endpoint`. Raises BadInput unless it has one of the forms described in this module."""
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme == "ipc":
        return _ipc(endpoint, rest)
    if separator and scheme == "tcp":
        return _tcp(endpoint, rest)
    raise BadInput(f"endpoint {endpoint!r} is not accepted: ipc:///DIR or tcp://HOST:PORT")


def _ipc(endpoint: str, path: str) -> IpcAddress:
    if not operating_system.HAS_UNIX_SOCKETS:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: Windows has no ipc://; must be tcp://HOST:PORT")
    folder = Path(path)
    if not folder.is_absolute() or "\0" in path:
        raise BadInput(f"endpoint {endpoint!r} is not accepted: ipc:// and an absolute directory")
    if folder.name == "telemetry":
        folder = folder.parent
    if not folder.name or ".." in folder.parts:
        raise BadInput(
            f"endpoint {endpoint!r} is not accepted: must be a directory of its own, such as ipc:///tmp/kvscope"
        )
    num_bytes = len(str(folder / "telemetry").encode(errors="surrogateescape"))
    if num_bytes > MAX_IPC_PATH_BYTES:
        raise BadInput(
            f"endpoint {endpoint!r} is not accepted: its socket path has {num_bytes} bytes,"
            f" at most {MAX_IPC_PATH_BYTES} are possible; choose a shorter directory"
        )
    return IpcAddress(folder)


def _tcp(endpoint: str, address: str) -> TcpAddress:
    host, separator, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not (separator and host and is_number and int(port) <= 65534):
        raise BadInput(f"endpoint {endpoint!r} is not accepted: tcp://HOST:PORT with a port from 0 to 65534")
    return TcpAddress(host, int(port))
