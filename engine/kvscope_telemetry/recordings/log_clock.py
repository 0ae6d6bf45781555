"""The time of each message in a recording. Owns the offset from an engine's monotonic clock to the file's."""

from __future__ import annotations

import time

from kvscope_telemetry.messages.telemetry import Frame, Goodbye, Hello, Progress, Snapshot, TelemetryMessage


class LogClock:
    """Log times in ns: the wall clock of an epoch's hello, moved by the engine's monotonic clock.

    They never go back: neither within an epoch, nor where a new one begins with its wall clock set back. No two frames
    have the same, though a heartbeat of a later time may come before both: each can be gone to.
    """

    def __init__(self) -> None:
        self._offset_ns = 0
        self._last_ns: int | None = None
        self._last_frame_ns = -1
        self._epoch: int | None = None

    def log_time_ns(self, message: TelemetryMessage) -> int:
        """When `message` was, not before any earlier one; what bears no time was just now."""
        if isinstance(message, Frame) and self._epoch is not None:  # most of all
            return self._frame_time_ns(message)
        hello = message if isinstance(message, Hello) else message.hello if isinstance(message, Snapshot) else None
        if hello is not None and hello.epoch != self._epoch:
            self._begin(hello)
        if isinstance(message, Progress | Goodbye) or self._epoch is None:
            last_ns = time.time_ns() if self._last_ns is None else self._last_ns
        else:
            last_ns = max(self._last_ns or 0, message.time_ns + self._offset_ns)
        if isinstance(message, Frame):
            last_ns = max(last_ns, self._last_frame_ns + 1)
            self._last_frame_ns = last_ns
        self._last_ns = last_ns
        return last_ns

    def _frame_time_ns(self, frame: Frame) -> int:
        time_ns = frame.time_ns + self._offset_ns
        self._last_frame_ns = self._last_ns = max(time_ns, self._last_ns or 0, self._last_frame_ns + 1)
        return self._last_ns

    def _begin(self, hello: Hello) -> None:
        self._epoch = hello.epoch
        self._offset_ns = max(hello.wall_time_ns, self._last_ns or 0) - hello.time_ns
