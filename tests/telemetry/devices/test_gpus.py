"""GPUs through NVML: each value may be unknown, a GPU may be lost and come back, and nothing raises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).parent))
from fake_nvml import CODES, GIB, LOST, NOT_SUPPORTED, UNINITIALIZED, FakeGpu, FakeNvml, NVMLError, two_gpus

from kvscope_telemetry.devices.gpus import RETRY_NS, Gpus
from kvscope_telemetry.devices.host_reader import HostReader, own_process
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.devices.throttling import is_slowed, names_of, reasons_text
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
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


def reader(nvml: FakeNvml, clock: Clock | None = None) -> Gpus:
    return Gpus(lambda name: nvml, clock or Clock())


def unknown_values(gpu: Gpu) -> set[str]:
    return {name for name, value in asdict(gpu).items() if value is None}


USUALLY_UNKNOWN = {"fan", "nvlink_sent_bytes_s", "nvlink_received_bytes_s"}


def test_all_values_of_both_gpus_are_read() -> None:
    first, second = reader(two_gpus()).sample()
    assert unknown_values(first) == USUALLY_UNKNOWN
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
def test_nvml_error_makes_only_that_value_unknown(question: str) -> None:
    for code in CODES:
        nvml = two_gpus()
        nvml.gpus[0].broken = {question: NVMLError(code)}
        first, second = reader(nvml).sample()
        assert unknown_values(first) == FIGURES[question] | USUALLY_UNKNOWN, code
        assert unknown_values(second) == USUALLY_UNKNOWN
        assert not first.fault


def test_unavailable_process_list_is_unknown_and_an_empty_one_is_not() -> None:
    nvml = two_gpus()
    nvml.gpus[0].processes = []
    error = NVMLError(NOT_SUPPORTED)
    nvml.gpus[1].broken = dict.fromkeys(
        ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"), error
    )
    first, second = reader(nvml).sample()
    assert first.processes == ()
    assert second.processes is None


def test_gpu_without_own_memory_is_not_lost() -> None:
    nvml = two_gpus()
    nvml.gpus[0].broken = {"nvmlDeviceGetMemoryInfo": NVMLError(NOT_SUPPORTED)}
    first = reader(nvml).sample()[0]
    assert not first.fault
    assert first.memory_total_bytes is None
    assert first.utilization == 0.75


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
def test_lost_gpu_reports_the_reason_and_comes_back(question: str) -> None:
    nvml = two_gpus()
    gpus = reader(nvml)
    assert not gpus.sample()[1].fault
    nvml.gpus[1].broken = {question: NVMLError(LOST), "nvmlDeviceGetMemoryInfo": NVMLError(LOST)}
    first, lost = gpus.sample()
    assert not first.fault
    assert (lost.name, lost.fault, lost.memory_used_bytes) == ("NVIDIA H100 80GB HBM3", "GPU is lost", None)
    nvml.gpus[1].broken = {}
    assert gpus.sample()[1].memory_used_bytes == 1 * GIB


def test_gpu_that_fell_off_the_bus_is_still_listed() -> None:
    nvml = two_gpus()
    gpus = reader(nvml)
    gpus.sample()
    del nvml.gpus[1]
    first, gone = gpus.sample()
    assert not first.fault
    assert gone.uuid == "GPU-bbbb"
    assert "fell off the bus" in gone.fault


def test_missing_driver_is_retried_periodically() -> None:
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
def test_machine_without_a_gpu_reports_why(error: Exception) -> None:
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
    nvml.gpus[0].link_kib = 0  # the driver was reloaded
    clock.now_ns += 500_000_000
    assert gpus.sample()[0].nvlink_sent_bytes_s is None


def test_throttle_reasons_are_described() -> None:
    assert names_of(0) == ()
    assert names_of(0x24) == ("power_cap", "sw_thermal")
    assert names_of(0x1004) == ("power_cap", "reason 0x1000")
    assert reasons_text(names_of(0x24)) == "power limit reached, thermal limit (driver)"
    assert is_slowed(["power_cap"])
    assert not is_slowed(["idle"])


def sampled(nvml: FakeNvml, *used: str) -> Devices:
    gpus = Gpus(lambda name: nvml, Clock(), used=used)
    return DevicesSampler(gpus, HostReader(own_process()), used=used).sample(1)


def test_used_gpu_is_identified_by_uuid_in_any_order() -> None:
    """CUDA orders GPUs by speed and reports UUIDs without a prefix; NVML orders them by PCI bus."""
    assert sampled(two_gpus(), "bbbb").used_gpus == (1,)
    assert sampled(two_gpus(), "bbbb", "aaaa").used_gpus == (1, 0), "in the order of the ranks"
    assert sampled(two_gpus()).used_gpus == ()
    assert sampled(two_gpus(), "cccc").used_gpus == ()
    assert len(sampled(two_gpus(), "cccc").gpus) == 2


def test_mig_instance_is_reported_with_its_own_memory() -> None:
    nvml = two_gpus()
    nvml.instances.append(FakeGpu("MIG-dddd", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=10 * GIB, used=2 * GIB))
    devices = sampled(nvml, "MIG-dddd")
    assert devices.used_gpus == (2,)
    (instance,) = [gpu for gpu in devices.gpus if gpu.index == 2]
    assert instance.memory_total_bytes == 10 * GIB
    assert sampled(nvml, "dddd").gpus == devices.gpus


def test_used_gpu_that_falls_off_the_bus_is_not_taken_for_a_mig_instance() -> None:
    nvml = two_gpus()
    sampler = DevicesSampler(
        Gpus(lambda name: nvml, Clock(), used=("bbbb",)), HostReader(own_process()), used=("bbbb",)
    )
    sampler.sample(1)
    nvml.gpus.pop()
    devices = sampler.sample(1)
    assert devices.used_gpus == (1,)
    assert "fell off the bus" in devices.gpus[1].fault


def test_values_unavailable_for_a_mig_instance_are_unknown() -> None:
    """Clocks, utilization, power and links belong to the whole GPU and are not reported for an instance."""
    told_of_it = {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetDisplayActive"}
    nvml, silent = two_gpus(), {question for question in FIGURES if question not in told_of_it}
    broken = {question: NVMLError(NOT_SUPPORTED) for question in silent}
    nvml.instances.append(FakeGpu("MIG-dddd", total=10 * GIB, used=2 * GIB, processes=[(7, GIB)], broken=broken))
    instance = sampled(nvml, "MIG-dddd").gpus[2]
    assert not instance.fault
    assert unknown_values(instance) == set().union(*(FIGURES[question] for question in silent)) | USUALLY_UNKNOWN
    assert instance.memory_free_bytes == 7 * GIB
    assert [process.used_bytes for process in instance.processes or ()] == [GIB]
