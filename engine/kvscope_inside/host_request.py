"""A request of a host engine, with what is published about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.producer.cache_state import KnownRequest


@dataclass(slots=True)
class HostRequest:
    """A request of the host, with what is published about it. Host modules add fields that they need."""

    host: Any
    """The host's own request object."""
    known: KnownRequest
    waits_since_ns: int
    """Time of the request's arrival or of its last preemption."""
    was_admitted: bool = False
    """Whether the request ever ran. A request may be preempted after its prefix hit, before it runs."""

    @property
    def is_running(self) -> bool:
        return self.known.state is RequestState.RUNNING
