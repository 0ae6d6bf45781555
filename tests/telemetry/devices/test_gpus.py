"""GPUs through NVML: each figure alone may be unknown, a GPU may be lost and come back, and nothing ever raises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).parent))
from fake_nvml import CODES, GIB, LOST, NOT_SUPPORTED, UNINITIALIZED, FakeGpu, FakeNvml, NVMLError, two_gpus

from kvscope_telemetry.devices.gpus import RETRY_NS, Gpus
from kvscope_telemetry.devices.host import HostReader, own_process
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.devices.throttling import in_words, is_slowed, names_of
from kvscope_telemetry.messages.devices import Devices, Gpu, GpuProcess

FIGURES = {
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_utilization"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetFieldValues": {"memory_temperature_celsius"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"max_sm_clock_mhz", "max_memory_clock_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttled_by"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetPcieThroughput": {"pcie_sent_bytes_s", "pcie_received_bytes_s"},
    "nvmlDeviceGetMemoryInfo_v2": {"memory_reserved_bytes"},
    "nvmlDeviceGetDisplayActive": {"display_active"},
}


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


def reader(nvml: FakeNvml, clock: Clock | None = None) -> Gpus:
    return Gpus(lambda name: nvml, clock or Clock())


def unknown_in(gpu: Gpu) -> set[str]:
    return {name for name, value in asdict(gpu).items() if value is None}


USUALLY_UNKNOWN = {"fan", "nvlink_sent_bytes_s", "nvlink_received_bytes_s"}


def test_every_gpu_tells_all_it_can() -> None:
    first, second = reader(two_gpus()).sample()
    assert unknown_in(first) == USUALLY_UNKNOWN
    assert (first.index, second.index, first.uuid) == (0, 1, "GPU-aaaa")
    assert first.memory_total_bytes == 80 * GIB
    parts = (first.memory_used_bytes, first.memory_reserved_bytes, first.memory_free_bytes)
    assert sum(part or 0 for part in parts) == first.memory_total_bytes
    assert first.processes == (
        GpuProcess(pid=4711, name="worker4711", used_bytes=24 * GIB),
        GpuProcess(pid=4712, name="worker4712", used_bytes=5 * GIB),
    )
    assert second.processes == (GpuProcess(pid=4713, name="worker4713", used_bytes=None),)
    assert (first.display_active, second.display_active) == (False, True)
    assert (first.power_watts, first.power_limit_watts, first.throttled_by) == (420.5, 700.0, ("power_cap",))


@pytest.mark.parametrize("question", FIGURES)
def test_any_error_makes_that_figure_unknown_and_no_other(question: str) -> None:
    for code in CODES:
        nvml = two_gpus()
        nvml.gpus[0].broken = {question: NVMLError(code)}
        first, second = reader(nvml).sample()
        assert unknown_in(first) == FIGURES[question] | USUALLY_UNKNOWN, code
        assert unknown_in(second) == USUALLY_UNKNOWN
        assert not first.fault


def test_no_list_of_processes_is_unknown_and_an_empty_one_is_not() -> None:
    nvml = two_gpus()
    nvml.gpus[0].processes = []
    error = NVMLError(NOT_SUPPORTED)
    nvml.gpus[1].broken = dict.fromkeys(
        ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"), error
    )
    first, second = reader(nvml).sample()
    assert first.processes == ()
    assert second.processes is None


def test_a_gpu_without_memory_of_its_own_is_not_lost() -> None:
    nvml = two_gpus()
    nvml.gpus[0].broken = {"nvmlDeviceGetMemoryInfo": NVMLError(NOT_SUPPORTED)}
    first = reader(nvml).sample()[0]
    assert not first.fault
    assert first.memory_total_bytes is None
    assert first.utilization == 0.75


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
def test_a_lost_gpu_says_why_and_comes_back(question: str) -> None:
    nvml = two_gpus()
    gpus = reader(nvml)
    assert not gpus.sample()[1].fault
    nvml.gpus[1].broken = {question: NVMLError(LOST), "nvmlDeviceGetMemoryInfo": NVMLError(LOST)}
    first, lost = gpus.sample()
    assert not first.fault
    assert (lost.name, lost.fault, lost.memory_used_bytes) == ("NVIDIA H100 80GB HBM3", "GPU is lost", None)
    nvml.gpus[1].broken = {}
    assert gpus.sample()[1].memory_used_bytes == 1 * GIB


def test_a_gpu_that_fell_off_the_bus_is_still_named() -> None:
    nvml = two_gpus()
    gpus = reader(nvml)
    gpus.sample()
    del nvml.gpus[1]
    first, gone = gpus.sample()
    assert not first.fault
    assert gone.uuid == "GPU-bbbb"
    assert "fell off the bus" in gone.fault


def test_a_driver_that_goes_is_looked_for_now_and_then() -> None:
    nvml, clock = two_gpus(), Clock()
    gpus = reader(nvml, clock)
    gpus.sample()
    nvml.broken = dict.fromkeys(("nvmlInit", "nvmlDeviceGetCount"), NVMLError(UNINITIALIZED))
    assert [gpu.fault for gpu in gpus.sample()] == ["NVML error 1"] * 2
    inits = nvml.num_inits
    gpus.sample()
    assert nvml.num_inits == inits
    nvml.broken = {}
    clock.now_ns += RETRY_NS
    assert [gpu.fault for gpu in gpus.sample()] == ["", ""]
    assert gpus.fault == ""


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), OSError("no library"), NVMLError(12)])
def test_a_laptop_without_a_gpu(error: Exception) -> None:
    def missing(name: str) -> FakeNvml:
        raise error

    gpus = Gpus(missing, Clock())
    assert gpus.sample() == ()
    assert gpus.fault


def test_nvlink_counters_become_rates() -> None:
    nvml, clock = two_gpus(), Clock()
    gpus = reader(nvml, clock)
    gpus.sample()
    nvml.gpus[0].link_kib += 2048
    clock.now_ns += 500_000_000
    assert gpus.sample()[0].nvlink_sent_bytes_s == 4 << 20
    nvml.gpus[0].link_kib = 0  # the driver was loaded anew
    clock.now_ns += 500_000_000
    assert gpus.sample()[0].nvlink_sent_bytes_s is None


def test_what_slows_a_gpu_down_is_told_in_words() -> None:
    assert names_of(0) == ()
    assert names_of(0x24) == ("power_cap", "sw_thermal")
    assert names_of(0x1004) == ("power_cap", "reason 0x1000")
    assert in_words(names_of(0x24)) == "power limit reached, thermal limit (driver)"
    assert is_slowed(["power_cap"])
    assert not is_slowed(["idle"])


def sampled(nvml: FakeNvml, *used: str) -> Devices:
    gpus = Gpus(lambda name: nvml, Clock(), used=used)
    return DevicesSampler(gpus, HostReader(own_process()), used=used).sample(1)


def test_the_gpu_that_is_used_is_known_by_its_uuid_in_whatever_order_drivers_count() -> None:
    """CUDA counts by speed and tells no prefix; NVML counts by the bus."""
    assert sampled(two_gpus(), "bbbb").used_gpus == (1,)
    assert sampled(two_gpus(), "bbbb", "aaaa").used_gpus == (1, 0), "in the order of the ranks"
    assert sampled(two_gpus()).used_gpus == ()
    assert sampled(two_gpus(), "cccc").used_gpus == ()
    assert len(sampled(two_gpus(), "cccc").gpus) == 2


def test_an_instance_of_mig_is_shown_with_its_own_memory() -> None:
    nvml = two_gpus()
    nvml.instances.append(FakeGpu("MIG-dddd", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=10 * GIB, used=2 * GIB))
    devices = sampled(nvml, "MIG-dddd")
    assert devices.used_gpus == (2,)
    (instance,) = [gpu for gpu in devices.gpus if gpu.index == 2]
    assert instance.memory_total_bytes == 10 * GIB
    assert sampled(nvml, "dddd").gpus == devices.gpus


def test_a_used_gpu_that_falls_off_the_bus_is_lost_and_no_instance() -> None:
    nvml = two_gpus()
    sampler = DevicesSampler(
        Gpus(lambda name: nvml, Clock(), used=("bbbb",)), HostReader(own_process()), used=("bbbb",)
    )
    sampler.sample(1)
    nvml.gpus.pop()
    devices = sampler.sample(1)
    assert devices.used_gpus == (1,)
    assert "fell off the bus" in devices.gpus[1].fault


def test_what_an_instance_of_mig_does_not_tell_is_unknown_and_not_nothing() -> None:
    """Its clocks, load, power and links are the whole GPU's, and not told of a part."""
    told_of_it = {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetDisplayActive"}
    nvml, silent = two_gpus(), {question for question in FIGURES if question not in told_of_it}
    broken = {question: NVMLError(NOT_SUPPORTED) for question in silent}
    nvml.instances.append(FakeGpu("MIG-dddd", total=10 * GIB, used=2 * GIB, processes=[(7, GIB)], broken=broken))
    instance = sampled(nvml, "MIG-dddd").gpus[2]
    assert not instance.fault
    assert unknown_in(instance) == set().union(*(FIGURES[question] for question in silent)) | USUALLY_UNKNOWN
    assert instance.memory_free_bytes == 7 * GIB
    assert [process.used_bytes for process in instance.processes or ()] == [GIB]
