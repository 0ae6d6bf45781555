"""Free host memory within control groups v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvscope_engine.model.device_memory.host_headroom import free_host_bytes
from kvscope_engine.model.platforms.device import free_bytes


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def free(tmp_path: Path, groups: str) -> int:
    (tmp_path / "self").write_text(groups)
    return free_host_bytes(tmp_path / "self", tmp_path)


def test_free_memory_without_limits_is_that_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path / "a", memory__max="max\n", memory__current="5000\n")
    assert free(tmp_path, "0::/a\n") == pytest.approx(free_bytes(torch.device("cpu")), rel=0.2)
    assert free(tmp_path, "nonsense\n0::/../../etc\n") > 1 << 20
    assert free_host_bytes(tmp_path / "nowhere") > 1 << 20


def test_tightest_limit_of_all_parent_groups_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", memory__max="9000\n", memory__current="2000\n", memory__stat="anon 4\ninactive_file 500\n")
    write(tmp_path / "a" / "b", memory__max="9000\n", memory__current="1000\n")
    assert free(tmp_path, "0::/a/b\n") == 7500
    write(tmp_path / "a" / "b", memory__max="1200\n")
    assert free(tmp_path, "0::/a/b\n") == 200
    write(tmp_path / "a" / "b", memory__max="900\n")
    assert free(tmp_path, "0::/a/b\n") == 0


def test_control_groups_v1_are_read(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "job"
    write(group, memory__limit_in_bytes="8000", memory__usage_in_bytes="3000", memory__stat="total_inactive_file 7\n")
    assert free(tmp_path, "3:cpu,cpuacct:/job\n2:memory:/job\n") == 5007
    assert free(tmp_path, "3:cpu,cpuacct:/job\n") > 1 << 20
