"""Summary of a device sample: unknown values are -1, never 0."""

from __future__ import annotations

from kvscope_telemetry.devices.device_reader import device_sample, is_engine_share
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.devices import Devices, Gpu, GpuProcess, Host, HostProcess
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, DeviceSample, Hello, ModelInfo

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


def hello(device_kind: str, *, has_engine: bool = True) -> Hello:
    return Hello(
        epoch=3,
        time_ns=0,
        wall_time_ns=0,
        model=ModelInfo(name="m"),
        cache=CacheInfo(num_blocks=1, block_size=1),
        device=DeviceInfo(kind=device_kind),
        capabilities=Capabilities(blocks=has_engine),
    )


def sample_of_gpu(gpu: Gpu, pid: int = 5) -> DeviceSample:
    return device_sample(Devices(epoch=3, time_ns=4, gpus=(Gpu(index=0), gpu), used_gpus=(1,)), hello("cuda"), pid)


def test_device_sample_has_the_values_of_the_gpu_used_by_the_engine() -> None:
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
    assert sample_of_gpu(GPU) == expected


def test_unknown_gpu_values_are_minus_one() -> None:
    assert sample_of_gpu(Gpu(index=1)) == DeviceSample(epoch=3, time_ns=4)
    assert sample_of_gpu(GPU, pid=6).process_bytes == -1
    assert sample_of_gpu(GPU, pid=7).process_bytes == -1
    assert device_sample(Devices(epoch=3, time_ns=4), hello("cuda")) == DeviceSample(epoch=3, time_ns=4)


def test_cpu_engine_is_summarized_by_host_and_process() -> None:
    process = HostProcess(pid=5, anonymous_bytes=10, file_bytes=5, shared_bytes=1, cores=1.0)
    host = Host(memory_total_bytes=100, memory_available_bytes=70, cores=(0.5, 0.9), processes=(process,))
    sample = device_sample(Devices(epoch=3, time_ns=4, host=host), hello("cpu"), 5)
    assert (sample.memory_total_bytes, sample.memory_used_bytes, sample.process_bytes) == (100, 30, 16)
    assert sample.utilization == 0.5
    assert is_engine_share(hello("cpu"))
    assert not is_engine_share(hello("cuda"))
    nothing = device_sample(Devices(epoch=3, time_ns=4, host=Host()), hello("cpu"), 5)
    assert nothing == DeviceSample(epoch=3, time_ns=4)


def test_without_an_engine_utilization_is_the_mean_of_all_cores() -> None:
    process = HostProcess(pid=5, anonymous_bytes=10, file_bytes=5, shared_bytes=1, cores=0.01)
    host = Host(memory_total_bytes=100, memory_available_bytes=70, cores=(1.0, 0.5), processes=(process,))
    alone = hello("cpu", has_engine=False)
    assert not is_engine_share(alone)
    sample = device_sample(Devices(epoch=3, time_ns=4, host=host), alone, 5)
    assert (sample.utilization, sample.process_bytes) == (0.75, -1)
    nothing = device_sample(Devices(epoch=3, time_ns=4, host=Host()), alone, 5)
    assert nothing == DeviceSample(epoch=3, time_ns=4)
