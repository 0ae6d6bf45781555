"""Batches that came while earlier ones are awaited, as bytes, bounded."""

from __future__ import annotations

from typing import Final

MAX_HELD_BYTES: Final = 32 << 20
_EACH_BYTES: Final = 128


class HeldBatches:
    """By sequence number. What there is no room for is dropped: it is a hole that a replay fills later."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._payloads: dict[int, bytes] = {}
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._payloads)

    def hold(self, seq: int, payload: bytes) -> None:
        """Keep it; the one that came last under a number stands."""
        self.take(seq)
        num_bytes = len(payload) + _EACH_BYTES
        if self._num_bytes + num_bytes <= self._max_bytes:
            self._payloads[seq] = payload
            self._num_bytes += num_bytes

    def take(self, seq: int) -> bytes | None:
        """The batch, which is no longer held; None when it is not here."""
        payload = self._payloads.pop(seq, None)
        if payload is not None:
            self._num_bytes -= len(payload) + _EACH_BYTES
        return payload

    def in_order(self) -> list[int]:
        """The numbers that are held."""
        return sorted(self._payloads)

    def clear(self) -> None:
        """Hold nothing."""
        self._payloads.clear()
        self._num_bytes = 0
