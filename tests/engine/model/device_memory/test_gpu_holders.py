"""Processes that hold GPU memory according to the driver: of the right GPU or instance, by name, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "telemetry" / "devices"))
from fake_nvml import GIB, LOST, NOT_SUPPORTED, FakeGpu, FakeNvml, NVMLError

from kvscope_engine.model.device_memory.gpu_holders import GpuHolder, GpuHolders, describe_holders, grown
from kvscope_telemetry.devices.gpus import Gpus

PID = 1 << 22
"""Process ids beyond those that Linux assigns."""


def holders(nvml: FakeNvml, uuid: str = "aaaa") -> GpuHolders:
    return GpuHolders(uuid, Gpus(lambda name: nvml, used=(uuid,)))


def shared(*processes: tuple[int, int | None], draws: int = 0) -> FakeNvml:
    """Return a GPU shared by this process and others, listed after an idle one."""
    mine = FakeGpu("GPU-aaaa", draws=draws, processes=[(os.getpid(), 9 * GIB), *processes])
    return FakeNvml([FakeGpu("GPU-bbbb", processes=[(77, 70 * GIB)]), mine])


def test_other_processes_on_the_gpu_are_named_largest_first() -> None:
    found = holders(shared((PID, GIB), (PID + 1, 3 * GIB)))
    assert found.others() == (
        GpuHolder(PID + 1, f"worker{PID + 1}", 3 * GIB),
        GpuHolder(PID, f"worker{PID}", GIB),
    )
    assert found.describe() == f"worker{PID + 1} 3.0 GiB (pid {PID + 1}), worker{PID} 1.0 GiB (pid {PID})"


def test_holders_are_found_without_torch() -> None:
    """`doctor` reports GPU memory even if torch is broken."""
    names = ("gpu_holders", "memory_plan", "paging")
    lines = "; ".join(f"import kvscope_engine.model.device_memory.{name}" for name in names)
    code = f"import sys; sys.modules['torch'] = None; {lines}"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_only_the_largest_of_many_processes_are_named() -> None:
    words = holders(shared(*((PID + number, GIB - number) for number in range(8)))).describe()
    assert words.endswith(f"(pid {PID + 2}), and 5 more")


@pytest.mark.parametrize("how", ["lost", "no list", "another numbering", "another GPU", "unknown"])
def test_no_gpu_memory_holders_are_named_if_the_driver_does_not_list_this_process(how: str) -> None:
    nvml, uuid = shared((PID, GIB)), "aaaa"
    if how == "lost":
        nvml.gpus[1].broken = {"nvmlDeviceGetMemoryInfo": NVMLError(LOST)}
    elif how == "no list":
        lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        nvml.gpus[1].broken = dict.fromkeys(lists, NVMLError(NOT_SUPPORTED))
    elif how == "another numbering":
        nvml.gpus[1].processes = [(4711, 9 * GIB), (PID, GIB)]  # as the driver in a container reports this process
    else:
        uuid = "cccc" if how == "another GPU" else ""
    assert holders(nvml, uuid).describe() == ""


def test_process_whose_gpu_memory_is_not_reported_is_named_without_a_size() -> None:
    assert holders(shared((PID, None))).describe() == f"worker{PID} (pid {PID})"


@pytest.mark.parametrize("draws", [0, 1])
def test_display_use_is_read_from_the_driver(draws: int) -> None:
    assert holders(shared(draws=draws)).draws_display() is bool(draws)


def test_display_use_is_unknown_if_not_supported() -> None:
    nvml = shared()
    nvml.gpus[1].broken = {"nvmlDeviceGetDisplayActive": NVMLError(NOT_SUPPORTED)}
    assert holders(nvml).draws_display() is None
    assert holders(nvml, "").draws_display() is None


def test_mig_instance_lists_only_its_own_processes() -> None:
    nvml = FakeNvml([FakeGpu("GPU-bbbb", processes=[(PID, 70 * GIB)])])
    nvml.instances.append(FakeGpu("MIG-dddd", processes=[(os.getpid(), GIB), (PID + 1, 2 * GIB)]))
    for uuid in ("dddd", "MIG-dddd"):
        assert holders(nvml, uuid).describe() == f"worker{PID + 1} 2.0 GiB (pid {PID + 1})"


@pytest.fixture
def engine_process() -> Iterator[int]:
    """A process started like an engine."""
    words = [sys.executable, "-c", "print(flush=True); input()", "kvscope-engine", "serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate(b"\n")


def test_kvscope_engine_that_holds_gpu_memory_is_named_as_another_engine(engine_process: int) -> None:
    words = holders(shared((engine_process, 20 * GIB))).describe()
    assert words == f"another kvscope engine 20.0 GiB (pid {engine_process})"


def test_only_processes_whose_gpu_memory_grew_are_named_with_the_increase() -> None:
    now = (
        GpuHolder(1, "desktop", 5 * GIB),
        GpuHolder(2, "game", 3 * GIB),
        GpuHolder(3, "browser", 2 * GIB),
        GpuHolder(4, "?", None),
    )
    before = {1: 5 * GIB, 3: GIB}
    assert [holder.description for holder in grown(now, before)] == [
        "game 3.0 GiB (pid 2)",
        "browser 1.0 GiB (pid 3)",
        "? (pid 4)",
    ]
    assert describe_holders(grown(now[:1], before)) == ""
