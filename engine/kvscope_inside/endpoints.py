"""Where an engine that is watched from inside tells: names of variables, addresses of data-parallel ranks, keys.

Imports nothing of kvscope's until something is to be told: each of an engine's processes loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvscope_telemetry.keys.key_ring import KeyRing

ENDPOINT: Final = "KVSCOPE_INSIDE"
"""Where to tell: ipc:///PATH, or tcp://HOST:PORT (keys are needed outside loopback)."""
RECORD: Final = "KVSCOPE_RECORD"
"""A file for a recording, beside."""
_LOOPBACK: Final = ("tcp://127.", "tcp://localhost", "tcp://[::1]")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank tells: the first at `endpoint`, others beside, PATH-1 or PORT + 2, …"""
    if not rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 2 * rank}"
    return f"{endpoint}-{rank}"


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
