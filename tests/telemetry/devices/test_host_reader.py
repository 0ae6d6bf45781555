"""The host and its processes, from a `/proc` written by a test and from the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvscope_telemetry.devices.host_reader import HostReader, own_process
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.messages.devices import Host

KIB = 1024
MEMINFO = """MemTotal: 1000 kB
MemFree: 100 kB
MemAvailable: 400 kB
Buffers: 10 kB
Cached: 250 kB
SReclaimable: 40 kB
SwapTotal: 50 kB
SwapFree: 20 kB
"""


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "stat").write_text("cpu  9 0 0 9\ncpu0 50 0 0 50 0 0 0 0 0\ncpu1 0 0 0 100 0 0 0 0 0\n")
    (tmp_path / "cpuinfo").write_text("model name\t: A Processor\n")
    for pid, pages in ((7, 30), (8, 90)):
        add_process(tmp_path, pid, pages)
    return tmp_path


def add_process(proc: Path, pid: int, pages: int, ticks: int = 0) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "statm").write_text(f"200 {pages} 3")
    kinds = f"RssAnon:\t{pages} kB\nRssFile:\t20 kB\nRssShmem:\t0 kB\nVmSwap:\t5 kB\n"
    (folder / "status").write_text(f"Name:\tworker {pid}\n{kinds}")
    (folder / "stat").write_text(f"{pid} (a (b) c) R {'0 ' * 10}{ticks} 0 0 0")


def test_host_reports_memory_cores_and_its_largest_processes(proc: Path) -> None:
    host = HostReader(None, num_largest=1, folder=proc).sample()
    assert (host.name, host.memory_total_bytes, host.memory_available_bytes) == ("A Processor", 1000 * KIB, 400 * KIB)
    assert (host.cached_bytes, host.swap_used_bytes) == (300 * KIB, 30 * KIB)
    assert host.cores == (0.5, 0.0)
    assert host.processes is not None
    (largest,) = host.processes
    assert (largest.pid, largest.name, largest.resident_bytes) == (8, "worker 8", 110 * KIB)
    assert largest.swapped_bytes == 5 * KIB
    assert largest.cores is None  # needs a previous sample


def test_cpu_shares_cover_the_time_since_the_previous_sample(proc: Path) -> None:
    clock = Clock()
    reader = HostReader((7,), folder=proc, clock_ns=clock)
    reader.sample()
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    add_process(proc, 7, 30, ticks=2 * ticks)
    (proc / "stat").write_text("cpu0 80 0 0 60 0 0 0 0\ncpu1 0 0 0 200 0 0 0 0\n")
    clock.now_ns = 4_000_000_000
    host = reader.sample()
    assert host.cores == (0.75, 0.0)
    assert host.processes is not None
    assert host.processes[0].cores == 0.5


@pytest.mark.parametrize("gone", ["meminfo", "stat", "7/status"])
def test_unreadable_proc_file_makes_values_unknown(proc: Path, gone: str) -> None:
    (proc / gone).write_text("nonsense:")
    host = HostReader((7,), folder=proc).sample()
    expected = {"meminfo": host.memory_total_bytes, "stat": host.cores, "7/status": None}[gone]
    assert expected is None
    if gone == "7/status":
        assert host.processes is not None
        assert host.processes[0].resident_bytes is None


def test_ended_process_is_left_out(proc: Path) -> None:
    assert HostReader((9,), folder=proc).sample().processes is None
    assert HostReader(None, folder=proc / "nowhere").sample().processes is None


def test_machine_without_proc_is_unknown(tmp_path: Path) -> None:
    host = HostReader(own_process(), folder=tmp_path / "nowhere").sample()
    assert host == Host(name=host.name)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the host is read from /proc only")
def test_this_machine_is_sampled_plausibly() -> None:
    devices = DevicesSampler().sample(3)
    assert devices.epoch == 3
    host = devices.host
    assert host is not None
    assert host.memory_total_bytes is not None
    assert host.processes is not None
    resident = host.processes[0].resident_bytes
    assert resident is not None
    assert 1 << 20 < resident < host.memory_total_bytes
