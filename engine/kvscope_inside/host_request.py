"""Request of a host engine, together with its published state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.producer.cache_state import KnownRequest


@dataclass(slots=True)
class HostRequest:
    """Base class for requests of a host engine. The modules of each host engine derive from it to add fields."""

    host: Any
    known: KnownRequest
    waiting_since_ns: int
    """Monotonic time of the request's arrival or of its last preemption."""
    was_admitted: bool = False
    """Whether the request has run at least once. It stays False for a request that was preempted before its
    first step.
    """

    @property
    def is_running(self) -> bool:
        return self.known.state is RequestState.RUNNING
