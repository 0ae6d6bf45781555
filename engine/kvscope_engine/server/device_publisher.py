"""Publishes samples of a machine's devices on engine sockets, for machines whose engine (vLLM, SGLang) does not publish
them.

Owns the sampling thread. The `Hello` declares neither blocks nor requests, and all commands but status and snapshot
queries are refused. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from typing import Final, Self

import msgspec

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.devices.device_reader import device_sample
from kvscope_telemetry.devices.device_watch import SAMPLE_S, SampledDevices
from kvscope_telemetry.devices.host_reader import HostReader
from kvscope_telemetry.devices.sampler import DevicesSampler
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.commands import Command, GetSnapshot, GetStatus, Status, refuse
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Goodbye,
    Heartbeat,
    Hello,
    ModelInfo,
)
from kvscope_telemetry.producer.cache_state import CacheState
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.transport.host_id import host_id
from kvscope_telemetry.transport.server_sockets import ServerSockets

DEVICES_ONLY: Final = Capabilities(
    engine="devices",
    commands=False,
    completions=False,
    physical_rows=False,
    free_rows=False,
    requests=False,
    owners=False,
    ref_counts=False,
    filled=False,
    prefix_hits=False,
    last_used=False,
    token_ids=False,
    steps=False,
    latencies=False,
    blocks=False,
)
NO_ENGINE: Final = "this address reports devices only: there is no engine"


class DevicePublisher:
    """Publishes device samples from construction to `close`; also a context manager.

    Raises BadInput for an endpoint that is not accepted, EndpointInUse if it is in use.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: KeyRing | None = None,
        sampler: SampledDevices | None = None,
        interval_s: float = SAMPLE_S,
    ) -> None:
        self._sampler = sampler or DevicesSampler(host=HostReader(None))
        self._interval_s = interval_s
        first = self._sampler.sample(secrets.randbits(48))
        self.hello = _hello(first)
        self._ready = threading.Event()
        self._sockets = ServerSockets(
            endpoint, on_command=self._answer, heartbeat=self._heartbeat, keys=keys, keyless=Role.VIEWER
        )
        self._ready.set()
        self._sockets.publish(self.hello)
        self._publish_sample(first)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-sampling", daemon=True)
        self._thread.start()

    @property
    def telemetry_endpoint(self) -> str:
        return self._sockets.telemetry_endpoint

    def close(self) -> None:
        """Publish a goodbye and stop. A sampling thread that hangs in a driver call is abandoned after a second."""
        self._closing.set()
        self._thread.join(timeout=1.0)
        self._sockets.publish(Goodbye(epoch=self.hello.epoch))
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._publish_sample(self._sampler.sample(self.hello.epoch))

    def _publish_sample(self, devices: Devices) -> None:
        self._sockets.publish(devices)
        with_used_gpu = msgspec.structs.replace(devices, used_gpus=tuple(gpu.index for gpu in devices.gpus[:1]))
        self._sockets.publish(device_sample(with_used_gpu, self.hello))

    # Called on the I/O thread.

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(epoch=self.hello.epoch, time_ns=time.monotonic_ns(), seq=0, step=0)

    def _answer(self, client: bytes, command: Command) -> None:
        self._ready.wait()
        if isinstance(command, GetSnapshot):
            self._sockets.reply(client, CacheState(self.hello).snapshot(command.tag))
        elif isinstance(command, GetStatus):
            self._sockets.reply(client, self._status(client, command.tag))
        else:
            self._sockets.reply(client, refuse(command, NO_ENGINE))

    def _status(self, client: bytes, tag: int) -> Status:
        caller = self._sockets.caller(client)
        return Status(
            phase="ready",
            telemetry_endpoint=self._sockets.telemetry_endpoint,
            hello=self.hello,
            tag=tag,
            role=caller.role if caller is not None else "",
            name=caller.name if caller is not None else "",
        )


def _hello(devices: Devices) -> Hello:
    """Return the `Hello` for these devices.

    Its pool has one ledger row, the minimum that a `Hello` allows, although there are no blocks.
    """
    gpu = devices.gpus[0] if devices.gpus else None
    host = devices.host
    name = gpu.name if gpu is not None else host.name if host is not None else ""
    total_bytes = gpu.memory_total_bytes if gpu is not None else host.memory_total_bytes if host is not None else None
    return Hello(
        epoch=devices.epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=ModelInfo(name=f"devices of {platform.node() or 'this machine'}"),
        cache=CacheInfo(num_blocks=1, block_size=1),
        device=DeviceInfo(
            kind="cuda" if gpu is not None else "cpu",
            name=name if len(devices.gpus) < 2 else f"{len(devices.gpus)} × {name}",
            total_bytes=total_bytes or 0,
            num_threads=os.cpu_count() or 0,
        ),
        engine_version=program_version(),
        pid=os.getpid(),
        host=host_id(),
        capabilities=DEVICES_ONLY,
    )
