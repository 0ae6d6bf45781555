"""What goes between an engine, the keeper of its forms' processes, and those processes. No torch, no XGrammar.

All are packets on sockets of pairs. What may be longer than a packet goes in several, after its length. Masks lie in
memory that an engine and a form's process share, a row for each completion; the packets only say which are new.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

PACKET_BYTES: Final = 64 << 10
FORK: Final = b"f"
"""To the keeper, with the socket of a new process."""
ASK: Final = struct.Struct("<cxHIi")
"""To a process, several in a packet: ACCEPT or DROP, the row for the mask, a completion's number, its token."""
MAX_ASK_BYTES: Final = PACKET_BYTES // ASK.size * ASK.size
ACCEPT: Final = b"a"
DROP: Final = b"d"
LONGEST: Final = struct.Struct("<Q")
"""Before answers: nanoseconds of computing that the longest of them took."""
ANSWER: Final = struct.Struct("<IBxxx")
"""The completion's number, and one of those below. There are never more than MAX_ROWS of them in a packet."""
GOES_ON: Final = 0
"""The mask is in the completion's row."""
ENDED: Final = 1
REFUSED: Final = 2
STUCK: Final = 3
"""No token of the model goes on."""
MAX_ROWS: Final = 4096
"""Of masks in a form's memory. Those that were never written take none."""
WORD_BITS: Final = 32


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


def masks_in(memory: int, num_logits: int = 0) -> NDArray[np.int32]:
    """The rows of masks in shared memory, which is made as large as they are where `num_logits` is given."""
    if num_logits:
        os.ftruncate(memory, MAX_ROWS * -(-num_logits // WORD_BITS) * np.dtype(np.int32).itemsize)
    return np.frombuffer(mmap.mmap(memory, 0), np.int32).reshape(MAX_ROWS, -1)


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
        raise EOFError("the other side closed the connection")
    return data
