"""Where an engine that is watched from inside tells: names of variables, addresses of data-parallel ranks, keys.

Imports nothing of kvscope's until something is to be told: each of an engine's processes loads it.
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
    from kvscope_telemetry.keys.key_ring import KeyRing

ENDPOINT: Final = "KVSCOPE_INSIDE"
"""Where to tell: ipc:///PATH, or tcp://HOST:PORT (keys are needed outside loopback)."""
RECORD: Final = "KVSCOPE_RECORD"
"""A file for a recording, beside."""
API: Final = "KVSCOPE_API"
"""Where the engine takes prompts, http://HOST:PORT. Set by the process of the server, for those that it starts."""
_LOOPBACK: Final = ("tcp://127.", "tcp://localhost", "tcp://[::1]")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank tells: the first at `endpoint`, others beside, PATH-1 or PORT + 2, …"""
    if not rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 2 * rank}"
    return f"{endpoint}-{rank}"


def note_api() -> None:
    """In a server's process that has bound its port and not begun to listen: have the processes that it starts know
    where prompts go. What a person said stands."""
    if API in os.environ:
        return
    found = {where for fd in _descriptors() if (where := _waits_at(fd))}
    if len(found) == 1:
        scheme = "https" if any(each.startswith("--ssl-keyfile") for each in sys.argv) else "http"
        os.environ[API] = f"{scheme}://{found.pop()}"


def api_of(engine: str, rank: int = 0, said: str = "") -> str:
    """Where an engine takes prompts, as `Hello.api` has it, by the scheme of its addresses, and what the engine said of
    it; empty: that is unknown."""
    scheme, _, where = (os.environ.get(API) or said).partition("://")
    options = [*(["tls=1"] if scheme == "https" else []), *([f"rank={rank}"] if rank else [])]
    return f"{engine}://{where.rstrip('/')}" + (f"/?{'&'.join(options)}" if options else "") if where else ""


def file_of_rank(path: Path, rank: int) -> Path:
    """Where a data-parallel rank is recorded: the first in the file, others beside, NAME-1, …"""
    return path.with_stem(f"{path.stem}-{rank}") if rank else path


def free_file(path: Path) -> Path:
    """`path`, or where there is a recording already, as after a restart, the next free name: NAME.2.mcap, …"""
    found, number = path, 1
    while found.exists() or found.with_name(f"{found.name}.part").exists():
        number += 1
        found = path.with_stem(f"{path.stem}.{number}")
    return found


def keys_for(endpoint: str, warn: Callable[[str], None]) -> KeyRing | None:
    """Of those who may connect; None where nobody from elsewhere can."""
    if not endpoint.startswith("tcp") or endpoint.startswith(_LOOPBACK):
        return None
    from kvscope_telemetry.keys.key_ring import KeyRing, default_keys_folder

    return KeyRing(default_keys_folder(), warn=warn)


def _descriptors() -> list[int]:
    """Open in this process."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]
    return []


def _waits_at(fd: int) -> str:
    """HOST:PORT of a TCP socket that has a port and does not listen yet; empty for all else."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if is_tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port = found.getsockname()[:2]
                    return "" if not port or _is_connected(found) else f"{_in_address(host)}:{port}"
    return ""


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
