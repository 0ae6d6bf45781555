"""What waits between the engine's thread and the wire. Bounded by count and bytes: the newest wins.

`put` costs the engine's thread about a microsecond and never waits. Knows no sockets.
"""

from __future__ import annotations

import threading
from collections import deque

from kvscope_telemetry.messages.message_size import approximate_bytes
from kvscope_telemetry.messages.telemetry import TelemetryMessage


class Outbox:
    """A queue of messages that throws away its oldest when it is full, and counts them in `num_dropped`."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.num_dropped = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[TelemetryMessage, int]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, message: TelemetryMessage) -> None:
        """Append a message; one alone is kept whatever its size."""
        num_bytes = approximate_bytes(message)
        with self._lock:
            self._messages.append((message, num_bytes))
            self._num_bytes += num_bytes
            while self._is_over():
                self._num_bytes -= self._messages.popleft()[1]
                self.num_dropped += 1

    def take(self) -> list[TelemetryMessage]:
        """Everything that waits, oldest first."""
        with self._lock:
            messages, self._messages, self._num_bytes = self._messages, deque(), 0
        return [message for message, _ in messages]

    def _is_over(self) -> bool:
        too_much = len(self._messages) > self._max_messages or self._num_bytes > self._max_bytes
        return too_much and len(self._messages) > 1
