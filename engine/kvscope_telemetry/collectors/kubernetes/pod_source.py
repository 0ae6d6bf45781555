"""Presents an engine in a pod as a `Source`: the source of such an engine on this machine, at a forwarded port."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.collectors.external_source import ExternalSource
from kvscope_telemetry.collectors.kubernetes.kubectl import forward_command
from kvscope_telemetry.collectors.kubernetes.pod_address import PodAddress
from kvscope_telemetry.collectors.kubernetes.port_forward import PortForward
from kvscope_telemetry.collectors.slot_source import SlotSource
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.sink import Sink

_LOCAL: Final = "127.0.0.1"


class _PodForwarding:
    """Part of a pod's source that differs from that of the same engine on this machine."""

    pod: PodAddress
    forward: PortForward

    @property
    def name(self) -> str:
        return self.pod.name


class PodSource(_PodForwarding, ExternalSource):
    def __init__(self, pod: PodAddress, forward: PortForward, address: ExternalAddress, sink: Sink | None) -> None:
        self.pod, self.forward = pod, forward
        super().__init__(address, sink=sink)

    @property
    def status(self) -> SourceStatus:
        return _with_failure(super().status, self.forward)

    def close(self) -> None:
        super().close()
        self.forward.close()


class PodSlotSource(_PodForwarding, SlotSource):
    def __init__(self, pod: PodAddress, forward: PortForward, address: ExternalAddress, sink: Sink | None) -> None:
        self.pod, self.forward = pod, forward
        super().__init__(address, sink=sink)

    @property
    def status(self) -> SourceStatus:
        return _with_failure(super().status, self.forward)

    def close(self) -> None:
        super().close()
        self.forward.close()


def open_pod(pod: PodAddress, *, api_key: str = "", sink: Sink | None = None) -> PodSource | PodSlotSource:
    """Return the source of the engine in `pod`, and forward a port to it until the source is closed.

    Raises BadInput if the address does not name an engine, or without kubectl.
    """
    pod.require_engine()
    forward = PortForward(partial(forward_command, pod))
    try:
        text = f"{pod.engine}://{_LOCAL}:{forward.local_port}"
        address = replace(ExternalAddress.parse(text, api_key=api_key), is_forwarded=True)
        engine = find_engine(pod.engine)
        if engine is not None and engine.publishes_slots:
            return PodSlotSource(pod, forward, address, sink)
        return PodSource(pod, forward, address, sink)
    except BaseException:
        forward.close()
        raise


def _with_failure(status: SourceStatus, forward: PortForward) -> SourceStatus:
    """Return `status` with kubectl's error, which is the reason why the forwarded port does not answer."""
    if not forward.failure or status.state == SourceState.LIVE:
        return status
    return replace(status, reason=forward.failure)
