"""Memory of a device by process, as segments of a bar and as rows of a table. Imports no Qt.

The segments add up to the used memory that the driver or system reports. Memory of no reported process is a separate
segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_app.session.device_log import host_used_bytes, used_bytes
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

MAX_NAMED: Final = 6
"""Maximum number of processes with their own segment; the others share one."""


@dataclass(frozen=True, slots=True)
class MemoryUser:
    """Process or other user of memory. `color_index` is its colour index, -1 if it is not a single process."""

    label: str
    num_bytes: int
    color_index: int = -1


def gpu_memory_users(gpu: Gpu) -> list[MemoryUser]:
    taken = used_bytes(gpu)
    if taken is None:
        return []
    sized = [(f"{p.name or 'process'} ({p.pid})", p.used_bytes) for p in gpu.processes or () if p.used_bytes]
    pieces = _largest_users([(text, size) for text, size in sized if size is not None])
    if gpu.memory_reserved_bytes:
        pieces.append(MemoryUser("reserved by the driver", gpu.memory_reserved_bytes))
    return _with_unattributed(pieces, taken)


def host_memory_users(host: Host) -> list[MemoryUser]:
    """Return the users of host memory: anonymous and shared memory of each process, without mapped files."""
    taken = host_used_bytes(host)
    if taken is None:
        return []
    own = [(f"{p.name} ({p.pid})", _sum(p.anonymous_bytes, p.shared_bytes)) for p in host.processes or ()]
    return _with_unattributed(_largest_users([(text, size) for text, size in own if size]), taken)


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """Process on a device; None means unknown."""

    device: str
    pid: int
    name: str
    num_bytes: int | None
    cores: float | None = None
    color_index: int = -1
    """Index of the process's segment in the device's bar, which determines its colour."""


def process_rows(devices: Devices) -> list[ProcessRow]:
    """Return all reported processes, GPU by GPU, then those of the host."""
    rows = []
    for gpu in devices.gpus:
        color_indices = _color_indices([(process.pid, process.used_bytes) for process in gpu.processes or ()])
        rows += [
            ProcessRow(f"GPU {gpu.index}", p.pid, p.name, p.used_bytes, color_index=color_indices.get(p.pid, -1))
            for p in gpu.processes or ()
        ]
    host = devices.host.processes or () if devices.host is not None else ()
    color_indices = _color_indices([(p.pid, _sum(p.anonymous_bytes, p.shared_bytes)) for p in host])
    return rows + [
        ProcessRow("Host", p.pid, p.name, p.resident_bytes, p.cores, color_indices.get(p.pid, -1)) for p in host
    ]


def _color_indices(sized: list[tuple[int, int | None]]) -> dict[int, int]:
    """Return the segment index by process id, for processes with their own segment."""
    known = sorted(((size, pid) for pid, size in sized if size), key=lambda pair: -pair[0])
    return {pid: index for index, (_, pid) in enumerate(known[:MAX_NAMED])}


def _largest_users(sized: list[tuple[str, int]]) -> list[MemoryUser]:
    sized = sorted(sized, key=lambda pair: -pair[1])
    pieces = [MemoryUser(text, size, index) for index, (text, size) in enumerate(sized[:MAX_NAMED])]
    rest = sized[MAX_NAMED:]
    if rest:
        pieces.append(MemoryUser(f"{len(rest)} more processes", sum(size for _, size in rest)))
    return pieces


def _with_unattributed(pieces: list[MemoryUser], taken: int) -> list[MemoryUser]:
    """Limit the pieces to `taken` bytes in total, since memory shared by processes counts once, and add the
    unattributed rest."""
    kept, left = [], taken
    for piece in pieces:
        size = min(piece.num_bytes, left)
        left -= size
        kept.append(MemoryUser(piece.label, size, piece.color_index))
    return [*kept, MemoryUser("no process reported", left)] if left else kept


def _sum(*parts: int | None) -> int | None:
    return None if None in parts else sum(part or 0 for part in parts)
