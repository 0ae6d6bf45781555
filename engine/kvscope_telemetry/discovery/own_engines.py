"""Finds engines of kvscope's own, and engines with kvscope's plugin, on this machine: they publish telemetry.

On Linux, the system lists all sockets. Elsewhere, and for sockets of containers, the folders are searched in which
kvscope's programs create sockets. Only sockets of this user are opened.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.collectors.external_engines import engine_name
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.bind_address import DEFAULT_PORT, runtime_folder
from kvscope_telemetry.transport.connections import NO_KEY

TIMEOUT_S: Final = 2.0
"""Time in seconds within which an engine must say what it is."""
MAX_SOCKETS: Final = 64
LOCAL_PORTS: Final = (DEFAULT_PORT, DEFAULT_PORT + 10)
"""Default ports of an engine and of kvscope's plugin on systems without Unix sockets."""
_SOCKET: Final = "telemetry"
_FOLDERS: Final = "kvscope*"
_CONNECT_S: Final = 0.5
_POLL_S: Final = 0.02
_OWN_NAME: Final = "kvscope"
_DEVICES: Final = "devices"


def own_endpoints() -> list[str]:
    """Return the endpoints of this machine at which a program listens, in a fixed order, at most `MAX_SOCKETS`.

    Besides `ipc://` sockets, `LOCAL_PORTS` are tried.
    """
    paths = {path.parent.resolve() for path in _telemetry_sockets() if _accepts(path)}
    endpoints = [f"ipc://{folder}/{_SOCKET}" for folder in sorted(paths)]
    endpoints += [f"tcp://127.0.0.1:{port}" for port in LOCAL_PORTS if _is_port_open(port)]
    return endpoints[:MAX_SOCKETS]


def probe_endpoint(endpoint: str) -> FoundEngine | None:
    """Connect without a key and wait for the engine's description. None if no engine answers in time."""
    try:
        source = LiveSource(endpoint, key=NO_KEY)
    except KvscopeError:
        return None
    with source:
        deadline_s = time.monotonic() + TIMEOUT_S
        status = source.status
        while time.monotonic() < deadline_s:
            source.update_mirror()
            status = source.status
            if source.mirror.hello is not None or status.state in (SourceState.REFUSED, SourceState.LOADING):
                break
            time.sleep(_POLL_S)
        return _found(endpoint, source.mirror.hello, status)


def _found(endpoint: str, hello: Hello | None, status: SourceStatus) -> FoundEngine | None:
    if hello is not None:
        return FoundEngine(
            endpoint, engine_name(hello.capabilities.engine), hello.model.name, hello.engine_version, _note(hello)
        )
    if status.state in (SourceState.REFUSED, SourceState.LOADING):
        return FoundEngine(endpoint, _OWN_NAME, note=status.reason)
    return None


def _note(hello: Hello) -> str:
    kind = hello.capabilities.engine
    if kind == _DEVICES:
        return "GPUs and memory of this machine only"
    if kind == _OWN_NAME:
        return ""
    return f"watched from inside; its API is {hello.api}" if hello.api else "watched from inside"


def _telemetry_sockets() -> Iterator[Path]:
    yield from (path for path in operating_system.listening_unix_sockets() if path.name == _SOCKET)
    parents = {runtime_folder().parent, operating_system.shared_folder().parent, Path(tempfile.gettempdir())}
    for parent in parents:
        with suppress(OSError):
            yield from parent.glob(f"{_FOLDERS}/{_SOCKET}")
            yield from parent.glob(f"{_FOLDERS}/*/{_SOCKET}")


def _accepts(path: Path) -> bool:
    """Whether a program of this user accepts connections at the socket `path`."""
    try:
        if not path.is_socket() or not operating_system.is_own(path.stat()):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_CONNECT_S)
            sock.connect(str(path))
    except OSError:
        return False
    return True


def _is_port_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
