"""Who has memory of a GPU, as the driver tells it: of the right GPU or instance, by name, or nothing at all."""

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
"""Linux gives none so high."""


def holders(nvml: FakeNvml, uuid: str = "aaaa") -> GpuHolders:
    return GpuHolders(uuid, Gpus(lambda name: nvml, used=(uuid,)))


def shared(*processes: tuple[int, int | None], draws: int = 0) -> FakeNvml:
    """A GPU on which this process computes beside others, behind one on which nobody does."""
    mine = FakeGpu("GPU-aaaa", draws=draws, processes=[(os.getpid(), 9 * GIB), *processes])
    return FakeNvml([FakeGpu("GPU-bbbb", processes=[(77, 70 * GIB)]), mine])


def test_others_on_the_same_gpu_are_named_largest_first() -> None:
    found = holders(shared((PID, GIB), (PID + 1, 3 * GIB)))
    assert found.others() == (
        GpuHolder(PID + 1, f"worker{PID + 1}", 3 * GIB),
        GpuHolder(PID, f"worker{PID}", GIB),
    )
    assert found.describe() == f"worker{PID + 1} 3.0 GiB (pid {PID + 1}), worker{PID} 1.0 GiB (pid {PID})"


def test_who_they_are_is_known_without_torch() -> None:
    """`doctor` tells of a GPU's memory where torch is broken, too."""
    names = ("gpu_holders", "memory_plan", "paging")
    lines = "; ".join(f"import kvscope_engine.model.device_memory.{name}" for name in names)
    code = f"import sys; sys.modules['torch'] = None; {lines}"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_of_many_the_largest_are_named() -> None:
    words = holders(shared(*((PID + number, GIB - number) for number in range(8)))).describe()
    assert words.endswith(f"(pid {PID + 2}), and 5 more")


@pytest.mark.parametrize("how", ["lost", "no list", "another numbering", "another GPU", "unknown"])
def test_what_the_driver_does_not_tell_is_nobody(how: str) -> None:
    nvml, uuid = shared((PID, GIB)), "aaaa"
    if how == "lost":
        nvml.gpus[1].broken = {"nvmlDeviceGetMemoryInfo": NVMLError(LOST)}
    elif how == "no list":
        lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        nvml.gpus[1].broken = dict.fromkeys(lists, NVMLError(NOT_SUPPORTED))
    elif how == "another numbering":
        nvml.gpus[1].processes = [(4711, 9 * GIB), (PID, GIB)]  # as a container's driver tells this process
    else:
        uuid = "cccc" if how == "another GPU" else ""
    assert holders(nvml, uuid).describe() == ""


def test_sizes_that_are_not_told_are_left_out() -> None:
    assert holders(shared((PID, None))).describe() == f"worker{PID} (pid {PID})"


@pytest.mark.parametrize("draws", [0, 1])
def test_whether_it_draws_a_display(draws: int) -> None:
    assert holders(shared(draws=draws)).draws_display() is bool(draws)


def test_a_driver_that_knows_no_displays() -> None:
    nvml = shared()
    nvml.gpus[1].broken = {"nvmlDeviceGetDisplayActive": NVMLError(NOT_SUPPORTED)}
    assert holders(nvml).draws_display() is None
    assert holders(nvml, "").draws_display() is None


def test_of_an_instance_of_mig_only_its_own_are_named() -> None:
    nvml = FakeNvml([FakeGpu("GPU-bbbb", processes=[(PID, 70 * GIB)])])
    nvml.instances.append(FakeGpu("MIG-dddd", processes=[(os.getpid(), GIB), (PID + 1, 2 * GIB)]))
    for uuid in ("dddd", "MIG-dddd"):
        assert holders(nvml, uuid).describe() == f"worker{PID + 1} 2.0 GiB (pid {PID + 1})"


@pytest.fixture
def engine_process() -> Iterator[int]:
    """A process that is started as an engine is."""
    words = [sys.executable, "-c", "print(flush=True); input()", "kvscope-engine", "serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate(b"\n")


def test_another_engine_is_called_one(engine_process: int) -> None:
    words = holders(shared((engine_process, 20 * GIB))).describe()
    assert words == f"another kvscope engine 20.0 GiB (pid {engine_process})"


def test_those_that_took_more_are_told_apart_from_those_that_had_it() -> None:
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
