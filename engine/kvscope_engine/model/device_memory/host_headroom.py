"""Computes how much host memory can still be allocated: what the machine has available, within the cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from kvscope_engine.model.platforms.device import free_bytes

_CGROUP_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names of the files with a cgroup's limit and usage, and of the reclaimable bytes in its statistics: version 2, then
version 1.
"""


def free_host_bytes(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can allocate without causing swapping or exceeding a cgroup limit."""
    machine = free_bytes(torch.device("cpu"))
    return max(0, min([machine, *(_free_in(folder) for folder in _folders(cgroup, root))]))


def _folders(cgroup: Path, root: Path) -> Iterator[Path]:
    """Yield the memory cgroups of this process and all their ancestors."""
    for line in _read_text(cgroup).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "memory" if controllers else root
        cgroup_path = PurePosixPath(path.lstrip("/"))
        yield from (mount / folder for folder in (cgroup_path, *cgroup_path.parents) if ".." not in folder.parts)


def _free_in(folder: Path) -> int:
    for limit_name, usage_name, reclaimable_name in _CGROUP_FILES:
        limit, usage = _read_text(folder / limit_name).strip(), _read_text(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            return int(limit) - int(usage) + _stat(folder / "memory.stat", reclaimable_name)
    return 1 << 62


def _stat(path: Path, name: str) -> int:
    for line in _read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
