"""Endpoints of an engine that is watched from inside: environment variables, addresses of data-parallel ranks, client
keys.

Imports nothing else of kvscope at module level, because each of the engine's processes loads this module.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvscope_telemetry.credentials.key_ring import KeyRing

ENDPOINT: Final = "KVSCOPE_INSIDE"
"""Environment variable with the telemetry endpoint: ipc:///PATH, or tcp://HOST:PORT (keys are needed outside
loopback).
"""
RECORD: Final = "KVSCOPE_RECORD"
"""Environment variable with the path of the recording. If it is not set, nothing is recorded."""
API: Final = "KVSCOPE_API"
"""Environment variable with the address of the engine's HTTP API, http://HOST:PORT. The server process sets it
for its child processes.
"""
_LOOPBACK: Final = ("tcp://127.", "tcp://localhost", "tcp://[::1]")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: rank 0 uses `endpoint`; rank n uses PATH-n, or PORT + 2 n."""
    if not rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 2 * rank}"
    return f"{endpoint}-{rank}"


def hook_api_server() -> None:
    """Set the environment variable `API` for child processes, from the server's TCP socket, which is bound but not
    listening yet.

    An existing value is not changed. Nothing is set unless this process has exactly one such socket.
    """
    if API in os.environ:
        return
    addresses = {address for fd in _file_descriptors() if (address := _unopened_address(fd))}
    if len(addresses) == 1:
        scheme = "https" if any(argument.startswith("--ssl-keyfile") for argument in sys.argv) else "http"
        os.environ[API] = f"{scheme}://{addresses.pop()}"


def api_of(engine: str, rank: int = 0, engine_address: str = "") -> str:
    """Return the address of the engine's API in the format of `Hello.api`; empty if unknown.

    `engine_address`: address from the engine's own configuration, used if the variable `API` is not set.
    """
    scheme, _, address = (os.environ.get(API) or engine_address).partition("://")
    options = [*(["tls=1"] if scheme == "https" else []), *([f"rank={rank}"] if rank else [])]
    return f"{engine}://{address.rstrip('/')}" + (f"/?{'&'.join(options)}" if options else "") if address else ""


def file_of_rank(path: Path, rank: int) -> Path:
    """Return the recording path of a data-parallel rank: rank 0 uses `path`, rank n NAME-n.EXTENSION."""
    return path.with_stem(f"{path.stem}-{rank}") if rank else path


def free_file(path: Path) -> Path:
    """Return `path`, or the next free name (NAME.2.mcap, ...) if a recording exists, for example after a restart."""
    candidate, number = path, 1
    while candidate.exists() or candidate.with_name(f"{candidate.name}.part").exists():
        number += 1
        candidate = path.with_stem(f"{path.stem}.{number}")
    return candidate


def keys_for(endpoint: str, warn: Callable[[str], None]) -> KeyRing | None:
    """Return the key ring of clients that may connect; None for an endpoint that only local clients can reach."""
    if not endpoint.startswith("tcp") or endpoint.startswith(_LOOPBACK):
        return None
    from kvscope_telemetry.credentials.key_ring import KeyRing, default_keys_folder

    return KeyRing(default_keys_folder(), warn=warn)


def _file_descriptors() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]
    return []


def _unopened_address(fd: int) -> str:
    """Return HOST:PORT of a TCP socket that is bound and not listening yet; empty for any other file descriptor."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port = sock.getsockname()[:2]
                    return "" if not port or _is_connected(sock) else f"{_bracket_ipv6(host)}:{port}"
    return ""


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
