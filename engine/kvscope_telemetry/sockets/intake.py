"""Messages read off a client's socket: whole ones, so many bytes at a time, and it notices a flood.

Owns the high water mark of its socket. ZeroMQ counts messages, not bytes: what it may hold of small ones would be all
memory of large ones. A mark that is changed on a connection can leave either end waiting for ever, so a flood ends the
connection, and the next one begins with a mark for messages of that size. Belongs to the thread that reads.
"""

from __future__ import annotations

import time
from typing import Final

import zmq

MAX_BURST_BYTES: Final = 64 << 20
"""Read without once finding nothing, beside the largest message; as much may wait on the connection after a flood."""
MAX_READ_BYTES: Final = 16 << 20
"""Read at a time, and one message more: decoded they take several times as much."""
MIN_HIGH_WATER: Final = 2
PARTS_S: Final = 0.005
"""Time at a go for the rest of a message of many parts: it must be read to get at those after it."""


class Intake:
    """Reads `socket`, which is not connected yet. At most `high_water` messages wait in it."""

    def __init__(self, socket: zmq.Socket[bytes], high_water: int) -> None:
        self.num_refused = 0
        """Messages of several parts: ours have one."""
        self.is_skipping = False
        """In the middle of such a message: the connection must not be given up."""
        self._socket = socket
        self._high_water = high_water
        self._burst_bytes = 0  # read since nothing waited
        self._largest = 0
        self.begin()

    @property
    def is_flooded(self) -> bool:
        """Whether more comes than can be read."""
        return self._burst_bytes - self._largest > MAX_BURST_BYTES

    def begin(self) -> None:
        """Before a connection is made; after a flood with a mark that the messages of the flood suggest."""
        mark = max(MIN_HIGH_WATER, MAX_BURST_BYTES // self._largest) if self.is_flooded else self._high_water
        self._socket.rcvhwm = min(mark, self._high_water)
        self._burst_bytes = self._largest = 0

    def receive(self, max_messages: int) -> list[bytes]:
        """What waits, oldest first: so many messages, or `MAX_READ_BYTES` and one more."""
        messages: list[bytes] = []
        num_bytes = 0
        try:
            while len(messages) < max_messages and num_bytes < MAX_READ_BYTES:
                if self.is_skipping and not self._skip_parts():
                    break
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)  # it knows whether more follows: to ask costs more
                if frame.more:
                    self.is_skipping = True
                    self.num_refused += 1
                else:
                    data = frame.bytes
                    messages.append(data)
                    num_bytes += len(data)
                    self._largest = max(self._largest, len(data))
        except zmq.Again:
            self._burst_bytes = self._largest = 0
        else:
            self._burst_bytes += num_bytes
        return messages

    def _skip_parts(self) -> bool:
        """Read on to the end of a message of several parts, for a moment; whether it is reached."""
        deadline = time.monotonic() + PARTS_S
        while time.monotonic() < deadline:
            self._socket.recv(zmq.NOBLOCK)
            if not self._socket.rcvmore:
                self.is_skipping = False
                return True
        return False
