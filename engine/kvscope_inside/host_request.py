"""Request of a host engine, together with what is published about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.producer.cache_state import KnownRequest


@dataclass(slots=True)
class HostRequest:
    """Base class of a host's requests. Host modules derive from it to add fields."""

    host: Any
    known: KnownRequest
    waiting_since_ns: int
    """Monotonic time of the request's arrival or of its last preemption."""
    was_admitted: bool = False
    """Whether the request ever ran. A request may be preempted after its prefix hit, before its first step."""

    @property
    def is_running(self) -> bool:
        return self.known.state is RequestState.RUNNING
