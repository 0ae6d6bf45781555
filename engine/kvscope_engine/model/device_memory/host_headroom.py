"""Computes how much host memory can still be allocated: what the machine has available, within the cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from kvscope_engine.model.platforms.device import free_bytes

_NAMES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names of limit, usage, and reclaimable part of the usage, for cgroup version 2 and version 1."""


def free_host_bytes(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can allocate without causing swapping or exceeding a cgroup limit."""
    machine = free_bytes(torch.device("cpu"))
    return max(0, min([machine, *(_free_in(folder) for folder in _folders(cgroup, root))]))


def _folders(cgroup: Path, root: Path) -> Iterator[Path]:
    """Yield the memory cgroups of this process and all their ancestors."""
    for line in _text(cgroup).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        own = PurePosixPath(path.lstrip("/"))
        yield from (top / folder for folder in (own, *own.parents) if ".." not in folder.parts)


def _free_in(folder: Path) -> int:
    for limit_name, use_name, idle_name in _NAMES:
        limit, use = _text(folder / limit_name).strip(), _text(folder / use_name).strip()
        if limit.isdigit() and use.isdigit():
            return int(limit) - int(use) + _stat(folder / "memory.stat", idle_name)
    return 1 << 62


def _stat(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
