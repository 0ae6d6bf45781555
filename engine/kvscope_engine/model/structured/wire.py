"""What goes between an engine, the keeper of its forms' processes, and those processes. No torch, no XGrammar.

All are packets on sockets of pairs. What may be longer than a packet goes in several, after its length.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

PACKET_BYTES: Final = 64 << 10
FORK: Final = b"f"
"""To the keeper, with the socket of a new process."""
ASK: Final = struct.Struct("<cIi")
"""To a process: ACCEPT or DROP, a completion's number, its token."""
ACCEPT: Final = b"a"
DROP: Final = b"d"
ANSWER: Final = struct.Struct("<IBxxxQ")
"""Before a mask: the completion's number, one of those below, nanoseconds of computing that it took."""
GOES_ON: Final = 0
ENDED: Final = 1
REFUSED: Final = 2
MAX_ANSWER_BYTES: Final = 1 << 20
"""Of a vocabulary of 8 million tokens."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, as XGrammar has to know them."""

    kind: str
    """How they are written: one of XGrammar's `VocabType`."""
    tokens: list[str]
    """By their ids, as many as the logits are wide; empty where no text is meant."""
    ends: list[int]
    """Those that may follow a text in its form."""


class Proof(msgspec.Struct, frozen=True):
    """What came of a form: why it is not accepted, or its first mask."""

    reason: str = ""
    mask: bytes = b""
    num_bytes: int = 0
    """Memory of its process that is its own."""


def send_long(line: socket.socket, data: bytes) -> None:
    """All of it; waits while nobody reads. Raises OSError when the other side is gone."""
    line.sendall(len(data).to_bytes(8, "little"))
    for start in range(0, len(data), PACKET_BYTES):
        line.sendall(data[start : start + PACKET_BYTES])


def receive_long(line: socket.socket) -> bytes:
    """What `send_long` sent; waits for it. Raises EOFError when the other side is gone."""
    num_bytes = int.from_bytes(_packet(line), "little")
    parts: list[bytes] = []
    while num_bytes > 0:
        parts.append(_packet(line))
        num_bytes -= len(parts[-1])
    return b"".join(parts)


def _packet(line: socket.socket) -> bytes:
    data = line.recv(PACKET_BYTES)
    if not data:
        raise EOFError("the other side is gone")
    return data
