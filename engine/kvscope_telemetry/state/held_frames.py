"""Frames kept while a snapshot is on its way: the newest of them, bounded in number and bytes. Knows no order."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.telemetry import Frame

MAX_FRAMES: Final = 20_000
MAX_BYTES: Final = 64 << 20
"""As they came over the wire."""


class HeldFrames:
    """When there are too many the older half goes: the newest are what a snapshot will not have."""

    def __init__(self) -> None:
        self._frames: list[tuple[Frame, bytes | None]] = []
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def hold(self, frame: Frame, data: bytes | None = None) -> None:
        """Keep one more, and the bytes it came as."""
        num_bytes = len(data or b"")
        while self._frames and (len(self._frames) >= MAX_FRAMES or self._num_bytes + num_bytes > MAX_BYTES):
            self._drop_older_half()
        self._frames.append((frame, data))
        self._num_bytes += num_bytes

    def take(self) -> list[tuple[Frame, bytes | None]]:
        """All of them; none are held afterwards."""
        frames = self._frames
        self.clear()
        return frames

    def clear(self) -> None:
        """Nobody needs them."""
        self._frames, self._num_bytes = [], 0

    def _drop_older_half(self) -> None:
        num_dropped = -(-len(self._frames) // 2)
        self._num_bytes -= sum(len(data or b"") for _, data in self._frames[:num_dropped])
        del self._frames[:num_dropped]
