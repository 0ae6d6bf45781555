"""WSL2 moves GPU memory to the host and says nothing: it is recognised by counts, or by steps that become slow."""

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
def test_windows_own_kernel_is_known_by_its_version(tmp_path: Path, version: str | None, found: bool) -> None:
    path = tmp_path / "version"
    if version is not None:
        path.write_text(version)
    assert is_wsl(path) == found


def run(watch: PagingWatch, milliseconds: float, count: int, num_tokens: int = 32) -> None:
    for _ in range(count):
        watch.record_step(num_tokens, int(milliseconds * 1e6))


def test_more_than_the_device_has_given_is_elsewhere() -> None:
    watch = PagingWatch()
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    said = watch.check(TOTAL, 0, 9 * GIB, 1.0)
    assert said.startswith("the driver seems to page GPU memory to host memory (1.0 GiB of what this engine was given")
    assert "CUDA - Sysmem Fallback Policy" in said
    assert "--gpu-memory-utilization" in said


def test_it_is_said_once_a_minute_at_most() -> None:
    watch = PagingWatch()
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0)
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0 + REPORT_INTERVAL_S - 1) == ""
    assert watch.check(TOTAL, 0, 9 * GIB, 100.0 + REPORT_INTERVAL_S)


def test_steps_that_are_slow_all_at_once_on_a_full_device() -> None:
    watch = PagingWatch()
    run(watch, 10, 50)
    run(watch, 80, NUM_SLOW_STEPS)
    assert "steps take 8 times what they took" in watch.check(TOTAL, 0, 7 * GIB, 100.0)
    run(watch, 80, 50)
    assert watch.check(TOTAL, 0, 7 * GIB, 900.0) == "", "that it stays so is no news"


def test_slow_steps_are_no_sign_where_memory_is_free_or_a_few_are_slow_or_it_came_slowly() -> None:
    watch = PagingWatch()
    run(watch, 10, 50)
    run(watch, 80, NUM_SLOW_STEPS)
    assert watch.check(TOTAL, GIB, 6 * GIB, 0.0) == ""
    for _ in range(20):
        run(watch, 10, 5)
        run(watch, 80, NUM_SLOW_STEPS - 1)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    for number in range(500):
        run(watch, 10 * 1.01**number, 1)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == ""
    run(watch, 5000, 50, num_tokens=4096)
    assert watch.check(TOTAL, 0, 7 * GIB, 0.0) == "", "the first of its size"
