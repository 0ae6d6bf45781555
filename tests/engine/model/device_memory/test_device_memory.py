"""What a CUDA device reports about others using it, from the driver and from other engines' files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "telemetry" / "devices"))
from fake_nvml import GIB, NOT_SUPPORTED, FakeGpu, FakeNvml, NVMLError

from kvscope_engine.model.device_memory import device_memory, gpu_holders, gpu_register
from kvscope_engine.model.device_memory.device_memory import CudaMemory
from kvscope_engine.model.device_memory.gpu_holders import GpuHolders
from kvscope_telemetry.devices.gpus import Gpus

ENGINE = """
import sys
from pathlib import Path
from kvscope_engine.model.device_memory.gpu_register import GpuRegister
register = GpuRegister(Path(sys.argv[1]))
register.await_turn(["aaaa"], print)
register.publish(3 << 30)
print(flush=True)
input()
"""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    """NVML of a machine with one GPU, the one in use."""
    nvml = FakeNvml([FakeGpu("GPU-aaaa")])
    monkeypatch.setattr(gpu_register, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(device_memory, "gpu_uuid", lambda device: "aaaa")
    monkeypatch.setattr(device_memory, "GpuHolders", lambda uuid: GpuHolders(uuid, Gpus(lambda name: nvml)))
    return nvml


def memory() -> CudaMemory:
    return CudaMemory(torch.device("cuda"))


def test_gpu_memory_announced_by_another_running_engine_is_counted_until_it_ends(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    assert memory().promised_bytes() == 0
    command = [sys.executable, "-c", ENGINE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        assert memory().promised_bytes() == 3 * GIB
        engine.communicate(b"\n")
    assert memory().promised_bytes() == 0


@pytest.mark.parametrize(
    ("told", "wsl", "draws"), [(1, False, True), (0, True, False), (None, False, False), (None, True, True)]
)
def test_display_use_is_read_or_assumed_on_wsl(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, told: int | None, wsl: bool, draws: bool
) -> None:
    """If the driver does not report it, a GPU under Windows is assumed to draw the desktop."""
    monkeypatch.setattr(gpu_holders, "is_wsl", lambda: wsl)
    nvml.gpus[0].draws = told or 0
    if told is None:
        nvml.gpus[0].broken = {"nvmlDeviceGetDisplayActive": NVMLError(NOT_SUPPORTED)}
    assert memory().draws_display() is draws
