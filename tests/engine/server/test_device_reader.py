"""Device samples: unknown is -1, whatever the driver does."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_engine.server.device_reader import CpuSampler, GpuSampler
from kvscope_telemetry.messages.telemetry import DeviceSample

UNKNOWN = (-1, -1, -1, -1.0, -1.0, -1.0)
QUESTIONS = (
    "nvmlInit",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
)
NVML_CODES = (*range(1, 28), 999)


class NVMLError(Exception):
    """As pynvml's: it carries a code."""


class FakeNvml:
    """Answers everything, but for the questions in `broken`, which raise what they map to."""

    def __init__(self) -> None:
        self.broken: dict[str, Exception] = {}
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self._answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=100, used=60, free=40),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=1, usedGpuMemory=5),
                SimpleNamespace(pid=os.getpid(), usedGpuMemory=50),
            ],
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetPowerUsage": 123_456,
            "nvmlDeviceGetTemperature": 66,
        }

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            if name in self.broken:
                raise self.broken[name]
            return self._answers[name]

        return answer


def numbers(sample: DeviceSample) -> tuple[float, ...]:
    return (
        sample.memory_total_bytes,
        sample.memory_used_bytes,
        sample.process_bytes,
        sample.utilization,
        sample.power_watts,
        sample.temperature_celsius,
    )


def test_a_gpu_that_answers() -> None:
    sample = GpuSampler(lambda name: FakeNvml()).sample(epoch=3)
    assert numbers(sample) == (100, 60, 50, 0.75, 123.456, 66.0)
    assert sample.epoch == 3


@pytest.mark.parametrize("code", NVML_CODES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_error_is_unknown_and_none_escapes(question: str, code: int) -> None:
    nvml = FakeNvml()
    sampler = GpuSampler(lambda name: nvml)
    whole = numbers(sampler.sample(1))
    nvml.broken[question] = NVMLError(code)
    found = numbers(GpuSampler(lambda name: nvml).sample(1))
    place = QUESTIONS.index(question)
    expected = list(whole)
    if place < 2:
        expected = list(UNKNOWN)
    elif place == 2:
        expected[0:2] = UNKNOWN[0:2]
    else:
        expected[place - 1] = UNKNOWN[place - 1]
    assert found == tuple(expected)
    assert 0 not in found


def test_a_lost_gpu_is_found_again() -> None:
    nvml = FakeNvml()
    sampler = GpuSampler(lambda name: nvml)
    nvml.broken = {question: NVMLError(15) for question in QUESTIONS}
    assert numbers(sampler.sample(1)) == UNKNOWN
    nvml.broken = {}
    assert numbers(sampler.sample(1)) == (100, 60, 50, 0.75, 123.456, 66.0)
    nvml.broken = {question: NVMLError(15) for question in QUESTIONS[2:]}
    assert numbers(sampler.sample(1)) == UNKNOWN


def test_without_pynvml_everything_is_unknown() -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    assert numbers(GpuSampler(missing).sample(1)) == UNKNOWN


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        ("2,0", ("nvmlDeviceGetHandleByIndex", (2,))),
        ("", ("nvmlDeviceGetHandleByIndex", (0,))),
        ("GPU-abc", ("nvmlDeviceGetHandleByUUID", ("GPU-abc",))),
    ],
)
def test_the_first_visible_gpu_is_asked(
    monkeypatch: pytest.MonkeyPatch, visible: str, asked: tuple[str, tuple[Any, ...]]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FakeNvml()
    GpuSampler(lambda name: nvml).sample(1)
    assert asked in nvml.asked


def test_memory_of_a_process_that_the_driver_does_not_tell_is_unknown() -> None:
    nvml = FakeNvml()
    nvml._answers["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    assert GpuSampler(lambda name: nvml).sample(1).process_bytes == -1


def test_a_cpu_tells_of_host_and_process() -> None:
    sampler = CpuSampler()
    sum(range(300_000))
    sample = sampler.sample(1)
    assert sample.memory_total_bytes > sample.memory_used_bytes > 0
    assert 1 << 20 < sample.process_bytes < sample.memory_total_bytes
    assert 0.0 < sample.utilization <= 1.0


def test_a_cpu_without_proc_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CpuSampler()

    def missing(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert numbers(sampler.sample(1))[:3] == (-1, -1, -1)
