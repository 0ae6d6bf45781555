"""Memory of a device by process, as segments of a bar and as rows of a table. Imports no Qt.

The segments add up to the used memory that the driver or system reports. Memory that belongs to no reported process is
a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_app.session.device_log import host_used_bytes, used_bytes
from kvscope_telemetry.messages.devices import Devices, Gpu, Host

MAX_NAMED: Final = 6


@dataclass(frozen=True, slots=True)
class MemoryUser:
    """Process or other user of a device's memory. `color_index` is -1 unless the user is a single process."""

    label: str
    num_bytes: int
    color_index: int = -1


def gpu_memory_users(gpu: Gpu) -> list[MemoryUser]:
    used = used_bytes(gpu)
    if used is None:
        return []
    process_sizes = [(f"{p.name or 'process'} ({p.pid})", p.used_bytes) for p in gpu.processes or () if p.used_bytes]
    users = _largest_users([(text, size) for text, size in process_sizes if size is not None])
    if gpu.memory_reserved_bytes:
        users.append(MemoryUser("reserved by the driver", gpu.memory_reserved_bytes))
    return _with_unattributed(users, used)


def host_memory_users(host: Host) -> list[MemoryUser]:
    """Return the users of host memory. The memory of a process includes anonymous and shared memory, but no
    mapped files.
    """
    used = host_used_bytes(host)
    if used is None:
        return []
    process_sizes = [(f"{p.name} ({p.pid})", _sum(p.anonymous_bytes, p.shared_bytes)) for p in host.processes or ()]
    return _with_unattributed(_largest_users([(text, size) for text, size in process_sizes if size]), used)


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """Row of the table of processes. A value of None or "" is unknown."""

    device: str
    pid: int
    name: str
    num_bytes: int | None
    cores: float | None = None
    color_index: int = -1
    """Index of the device bar's segment with the same colour, or -1 if the process has no segment of its own."""


def process_rows(devices: Devices) -> list[ProcessRow]:
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


def _color_indices(sizes: list[tuple[int, int | None]]) -> dict[int, int]:
    sorted_sizes = sorted(((size, pid) for pid, size in sizes if size), key=lambda pair: -pair[0])
    return {pid: index for index, (_, pid) in enumerate(sorted_sizes[:MAX_NAMED])}


def _largest_users(sizes: list[tuple[str, int]]) -> list[MemoryUser]:
    sizes = sorted(sizes, key=lambda pair: -pair[1])
    users = [MemoryUser(text, size, index) for index, (text, size) in enumerate(sizes[:MAX_NAMED])]
    others = sizes[MAX_NAMED:]
    if others:
        users.append(MemoryUser(f"{len(others)} more processes", sum(size for _, size in others)))
    return users


def _with_unattributed(users: list[MemoryUser], used: int) -> list[MemoryUser]:
    """Limit the users to `used` bytes in total, and add a user for memory that belongs to no reported process.

    The limit is needed because memory shared by processes is reported for each of them.
    """
    limited, remaining = [], used
    for user in users:
        size = min(user.num_bytes, remaining)
        remaining -= size
        limited.append(MemoryUser(user.label, size, user.color_index))
    return [*limited, MemoryUser("no process reported", remaining)] if remaining else limited


def _sum(*values: int | None) -> int | None:
    return None if None in values else sum(value or 0 for value in values)
