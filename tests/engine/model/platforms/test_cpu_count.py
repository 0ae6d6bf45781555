"""CPU cores as the machine has them and as the process may use them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvscope_engine.model.platforms.cpu_count import cpu_quota, physical_cores, usable_cores

V2 = "0::/user.slice/mine\n"
V1 = "4:memory:/box\n3:cpu,cpuacct:/box/inner\n0::/\n"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_two_hyperthreads_are_one_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7") * 2):
        put(tmp_path / f"cpu{cpu}" / "topology", thread_siblings_list=siblings)
    assert physical_cores(range(8), tmp_path) == 4
    assert physical_cores({0, 4}, tmp_path) == 1
    assert physical_cores({4, 5, 6}, tmp_path) == 3


def test_each_cpu_counts_as_a_core_if_the_topology_is_unknown(tmp_path: Path) -> None:
    assert physical_cores({0, 3, 9}, tmp_path) == 3


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000", 1.5), ("max 100000", math.inf), ("nonsense", math.inf)])
def test_cgroup_v2_quota_limits_the_cores(tmp_path: Path, limit: str, cores: float) -> None:
    put(tmp_path / "user.slice" / "mine", cpu__max=limit)
    assert cpu_quota(V2, tmp_path) == cores


def test_cpu_quota_follows_the_tightest_parent_cgroup(tmp_path: Path) -> None:
    put(tmp_path / "user.slice" / "mine", cpu__max="800000 100000")
    put(tmp_path / "user.slice", cpu__max="200000 100000")
    put(tmp_path, cpu__max="400000 100000")
    assert cpu_quota(V2, tmp_path) == 2.0


def test_cgroup_v1_quota_limits_the_cores(tmp_path: Path) -> None:
    put(tmp_path / "cpu,cpuacct" / "box" / "inner", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(V1, tmp_path) == math.inf
    put(tmp_path / "cpu,cpuacct" / "box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cpu_quota(V1, tmp_path) == 0.5


def test_container_reads_the_quota_of_its_mount(tmp_path: Path) -> None:
    """The path is the host's, but the files are at the mount."""
    put(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert cpu_quota(V1, tmp_path) == 3.0
    assert cpu_quota("", tmp_path) == math.inf


def test_at_least_one_core_is_usable() -> None:
    assert usable_cores() >= 1
