"""What a glance needs of devices: unknown is -1, never 0."""

from __future__ import annotations

from kvscope_telemetry.devices.device_reader import device_sample
from kvscope_telemetry.messages.devices import Devices, Gpu, GpuProcess, Host, HostProcess
from kvscope_telemetry.messages.telemetry import DeviceSample

GPU = Gpu(
    index=1,
    memory_total_bytes=100,
    memory_used_bytes=50,
    memory_reserved_bytes=10,
    memory_free_bytes=40,
    processes=(GpuProcess(pid=5, used_bytes=30), GpuProcess(pid=6)),
    utilization=0.75,
    power_watts=123.5,
    temperature_celsius=66.0,
)


def of_gpu(gpu: Gpu, pid: int = 5) -> DeviceSample:
    return device_sample(Devices(epoch=3, time_ns=4, gpus=(Gpu(index=0), gpu), used_gpus=(1,)), "cuda", pid)


def test_the_gpu_that_the_engine_uses() -> None:
    expected = DeviceSample(
        epoch=3,
        time_ns=4,
        memory_total_bytes=100,
        memory_used_bytes=60,
        process_bytes=30,
        utilization=0.75,
        power_watts=123.5,
        temperature_celsius=66.0,
    )
    assert of_gpu(GPU) == expected


def test_what_is_unknown_of_a_gpu() -> None:
    assert of_gpu(Gpu(index=1)) == DeviceSample(epoch=3, time_ns=4)
    assert of_gpu(GPU, pid=6).process_bytes == -1
    assert of_gpu(GPU, pid=7).process_bytes == -1
    assert device_sample(Devices(epoch=3, time_ns=4), "cuda") == DeviceSample(epoch=3, time_ns=4)


def test_host_and_process_on_a_cpu() -> None:
    process = HostProcess(pid=5, anonymous_bytes=10, file_bytes=5, shared_bytes=1, cores=1.0)
    host = Host(memory_total_bytes=100, memory_available_bytes=70, cores=(0.5, 0.9), processes=(process,))
    sample = device_sample(Devices(epoch=3, time_ns=4, host=host), "cpu", 5)
    assert (sample.memory_total_bytes, sample.memory_used_bytes, sample.process_bytes) == (100, 30, 16)
    assert sample.utilization == 0.5
    assert device_sample(Devices(epoch=3, time_ns=4, host=Host()), "cpu", 5) == DeviceSample(epoch=3, time_ns=4)
