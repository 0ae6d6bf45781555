"""How many threads a model on a CPU gets without being told: the physical cores that this process may really use.

Counted are the CPUs it may run on (affinity, cpusets), two hyperthreads of one core once, and no more than the CPU
time that its control groups (v1 or v2, those above it too) give it a second. Knows no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

TOLD_BY: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Who sets one of these has said how many threads a library gets, and is left alone."""
CGROUPS: Final = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores for this process, 1 at least."""
    allowed = os.sched_getaffinity(0)
    quota = cpu_quota(_read(Path("/proc/self/cgroup")), CGROUPS)
    return max(1, int(min(physical_cores(allowed, Path("/sys/devices/system/cpu")), quota)))


def physical_cores(allowed: Collection[int], system: Path) -> int:
    """Cores behind the CPUs `allowed`; CPUs of which `system` does not tell count as one each."""
    return len({_read(system / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in allowed})


def cpu_quota(own_groups: str, mount: Path) -> float:
    """CPU seconds a second that the groups of /proc/self/cgroup's text may use; infinity without a limit."""
    return min((_quota(folder) for folder in _folders(own_groups, mount)), default=float("inf"))


def _folders(own_groups: str, mount: Path) -> Iterator[Path]:
    """Of each group that may limit the CPU, and of all above it. A container sees its own at the mount itself."""
    for line in own_groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        group = PurePosixPath(path.lstrip("/"))
        yield from (root / part for part in (group, *group.parents))


def _quota(folder: Path) -> float:
    limit, _, period = _read(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if limit.isdigit() and period.isdigit() and int(period) > 0:
        return int(limit) / int(period)
    return float("inf")  # "max" and -1 are no limit


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
