"""On WSL2 the driver pages GPU memory to the host silently: detected by byte counts, or by steps that become slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_engine.model.device_memory.paging import NUM_SLOW_STEPS, REPORT_INTERVAL_S, PagingWatch, is_wsl

GIB = 1 << 30
TOTAL = 8 * GIB


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("Linux version 6.6.114.1-microsoft-standard-WSL2 (root@1) (gcc 13) #1 SMP", True),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-13)", False),
        (None, False),
    ],
)
def test_wsl_is_recognized_by_the_kernel_version(tmp_path: Path, version: str | None, found: bool) -> None:
    path = tmp_path / "version"
    if version is not None:
        path.write_text(version)
    assert is_wsl(path) == found


def record_steps(watch: PagingWatch, milliseconds: float, count: int, num_tokens: int = 32) -> None:
    for _ in range(count):
        watch.record_step(num_tokens, int(milliseconds * 1e6))


def test_allocation_beyond_the_device_is_reported_as_paging() -> None:
    watch = PagingWatch()
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    said = watch.check(TOTAL, 0, 9 * GIB, 1.0)
    assert said.startswith("the driver seems to page GPU memory to host memory (1.0 GiB of this engine's GPU memory")
    assert "CUDA - Sysmem Fallback Policy" in said
    assert "--gpu-memory-utilization" in said


def test_paging_is_reported_at_most_once_per_minute() -> None:
    watch = PagingWatch()
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0)
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0 + REPORT_INTERVAL_S - 1) == ""
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0 + REPORT_INTERVAL_S)


def test_sudden_slow_steps_on_a_full_device_are_reported() -> None:
    watch = PagingWatch()
    record_steps(watch, 10, 50)
    record_steps(watch, 80, NUM_SLOW_STEPS)
    assert "steps take 8 times as long as before" in watch.check(TOTAL, 0, 7 * GIB, 100.0)
    record_steps(watch, 80, 50)
    assert watch.check(TOTAL, 0, 7 * GIB, 900.0) == "", "steps that stay slow must not be reported again"


def test_slow_steps_with_free_memory_or_a_slow_onset_are_not_reported() -> None:
    watch = PagingWatch()
    record_steps(watch, 10, 50)
    record_steps(watch, 80, NUM_SLOW_STEPS)
    assert watch.check(TOTAL, GIB, 6 * GIB, 0.0) == ""
    for _ in range(20):
        record_steps(watch, 10, 5)
        record_steps(watch, 80, NUM_SLOW_STEPS - 1)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    for number in range(500):
        record_steps(watch, 10 * 1.01**number, 1)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    record_steps(watch, 5000, 50, num_tokens=4096)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == "", "the first steps of a size are no evidence"
