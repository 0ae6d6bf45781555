"""Devices without an engine: a desktop attaches, sees every GPU, and is refused what needs an engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "telemetry" / "devices"))
from fake_nvml import LOST, FakeNvml, NVMLError, two_gpus

from kvscope_engine.server.device_publisher import NO_ENGINE, DevicePublisher
from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.devices.host_reader import HostReader
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.messages.commands import Abort, Failed, Refused, Reply, Submit
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import DeviceSample
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState, Update
from kvscope_telemetry.sources.live_source import LiveSource

LIMIT_S = 60.0


@pytest.fixture
def nvml() -> FakeNvml:
    return two_gpus()


@pytest.fixture
def source(folder: Path, nvml: FakeNvml) -> Iterator[LiveSource]:
    sampler = DevicesSampler(Gpus(lambda name: nvml), HostReader(None))
    with DevicePublisher(f"ipc://{folder}", sampler=sampler, interval_s=0.02) as publisher:
        source = LiveSource(publisher.telemetry_endpoint)
        yield source
        source.close()


def updates_until(source: LiveSource, is_enough: Callable[[Update], bool]) -> list[Update]:
    found: list[Update] = []
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        update = source.poll_update()
        if update is None:
            time.sleep(0.005)
            continue
        found.append(update)
        if is_enough(update):
            return found
    raise AssertionError("it never came")


def last_devices(updates: list[Update]) -> Devices:
    return [devices for update in updates for devices in update.devices][-1]


def test_a_desktop_attaches_and_sees_every_gpu(source: LiveSource) -> None:
    updates = updates_until(source, lambda update: update.snapshot is not None)
    mirror = Mirror()
    mirror.apply(updates[-1])
    assert mirror.hello is not None
    can = mirror.hello.capabilities
    assert (can.engine, can.blocks, can.commands, can.requests) == ("devices", False, False, False)
    assert mirror.hello.device.kind == "cuda"
    updates = updates_until(source, lambda update: bool(update.devices and update.samples))
    devices = last_devices(updates)
    assert [gpu.index for gpu in devices.gpus] == [0, 1]
    assert devices.host is not None
    sample: DeviceSample = updates[-1].samples[-1]
    assert sample.utilization == 0.75
    assert source.status.state is SourceState.LIVE


def test_a_gpu_that_is_lost_meanwhile_is_told(source: LiveSource, nvml: FakeNvml) -> None:
    updates_until(source, lambda update: bool(update.devices))
    nvml.gpus[0].broken = dict.fromkeys(
        ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), NVMLError(LOST)
    )
    updates = updates_until(source, lambda update: any(devices.gpus[0].fault for devices in update.devices))
    assert last_devices(updates).gpus[0].fault == "GPU is lost"


def test_what_needs_an_engine_is_refused_with_the_reason(source: LiveSource) -> None:
    updates_until(source, lambda update: update.snapshot is not None)
    source.send(Submit(request_id="r", prompt="x"))
    source.send(Abort(request_id="r"))
    replies: list[Reply] = []
    deadline_s = time.monotonic() + LIMIT_S
    while len(replies) < 2 and time.monotonic() < deadline_s:
        replies += source.poll_replies()
        time.sleep(0.005)
    assert {type(reply) for reply in replies} == {Refused, Failed}
    assert all(NO_ENGINE in reply.reason for reply in replies if isinstance(reply, Refused | Failed))
