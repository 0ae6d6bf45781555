"""Default number of threads for a model on a CPU: the physical cores that this process may use.

Counts the CPUs on which the process may run (affinity, cpusets), with the hyperthreads of a core counted once, limited
by the CPU time that its control groups (v1 or v2, and their parents) allow. Does not depend on torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

THREAD_COUNT_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which users set the number of threads of a library; if one is set, it is respected."""
CGROUPS: Final = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores for this process, at least 1."""
    allowed = os.sched_getaffinity(0)
    quota = cpu_quota(_read_text(Path("/proc/self/cgroup")), CGROUPS)
    return max(1, int(min(physical_cores(allowed, Path("/sys/devices/system/cpu")), quota)))


def physical_cores(allowed: Collection[int], system: Path) -> int:
    """Return the number of physical cores of the CPUs `allowed`.

    A CPU that the sysfs folder `system` does not describe counts as a core.
    """
    return len({_read_text(system / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in allowed})


def cpu_quota(own_groups: str, mount: Path) -> float:
    """Return the CPU seconds per second that the process's control groups allow; infinity without a limit.

    `own_groups` is the text of /proc/self/cgroup.
    """
    return min((_quota(folder) for folder in _folders(own_groups, mount)), default=float("inf"))


def _folders(own_groups: str, mount: Path) -> Iterator[Path]:
    """Yield the folder of each of the process's cgroups that may limit the CPU, and the folders of its parents.

    The last parent is the mount point, which in a container is usually the folder of the process's own cgroup.
    """
    for line in own_groups.splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        group = PurePosixPath(path.lstrip("/"))
        yield from (root / group_path for group_path in (group, *group.parents))


def _quota(folder: Path) -> float:
    limit, _, period = _read_text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = _read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")
    if limit.isdigit() and period.isdigit() and int(period) > 0:
        return int(limit) / int(period)
    return float("inf")  # "max" and -1 are no limit


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
