"""Protocol between the engine, the fork server, and the grammar processes. Imports neither torch nor XGrammar.

Messages are packets on socket pairs. A message that may exceed a packet is sent in several packets, after its length.
Token masks are in memory shared by the engine and a grammar's process, with a row per completion; packets only say
which rows were updated.
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
"""Message that asks the fork server for a new grammar process. It is sent together with the file descriptor of
the socket for that process.
"""
REQUEST: Final = struct.Struct("<cxHIi")
"""Format of a request to a grammar's process: ACCEPT or DROP, mask row, number of the completion, token id. A
packet may contain several requests.
"""
MAX_REQUEST_BYTES: Final = PACKET_BYTES // REQUEST.size * REQUEST.size
ACCEPT: Final = b"a"
DROP: Final = b"d"
ANSWERS_HEADER: Final = struct.Struct("<Q")
"""Format of the header of a packet of answers: the CPU time of the slowest answer in the packet, in nanoseconds."""
ANSWER: Final = struct.Struct("<IBxxx")
"""Format of an answer: number of the completion, and its state (CONTINUES, ENDED, REFUSED or STUCK). A packet
has at most MAX_ROWS answers.
"""
CONTINUES: Final = 0
"""State of a completion whose mask row contains the allowed next tokens."""
ENDED: Final = 1
REFUSED: Final = 2
STUCK: Final = 3
"""State of a completion whose text no token of the model can continue."""
MAX_ROWS: Final = 4096
"""Number of mask rows in a grammar's shared memory. Rows that are never written occupy no physical memory."""
WORD_BITS: Final = 32


class Vocabulary(msgspec.Struct, frozen=True):
    """Token texts of a model, as needed to construct XGrammar's tokenizer info."""

    kind: str
    """Encoding of the token texts: a name in XGrammar's `VocabType`."""
    tokens: list[str]
    """Token texts by id, one for each column of the logits; "" for ids that have no text."""
    ends: list[int]
    """Token ids that may follow a complete text (end of sequence)."""


class TrialResult(msgspec.Struct, frozen=True):
    """Result of compiling and testing a grammar: the reason why it is refused, or the mask for its first token
    (int32 words).
    """

    reason: str = ""
    mask: bytes = b""


def map_masks(memory: int, num_logits: int = 0) -> NDArray[np.int32]:
    """Map the mask rows in the shared memory with file descriptor `memory`. With `num_logits`, the memory is resized
    for that many logits first.

    Returns int32 of shape (MAX_ROWS, 32-bit words per row).
    """
    if num_logits:
        os.ftruncate(memory, MAX_ROWS * -(-num_logits // WORD_BITS) * np.dtype(np.int32).itemsize)
    return np.frombuffer(mmap.mmap(memory, 0), np.int32).reshape(MAX_ROWS, -1)


def send_long(line: socket.socket, data: bytes) -> None:
    """Send `data`, in several packets if needed. Blocks until the other side reads them.

    Raises OSError if the other side closed the connection.
    """
    line.sendall(len(data).to_bytes(8, "little"))
    for start in range(0, len(data), PACKET_BYTES):
        line.sendall(data[start : start + PACKET_BYTES])


def receive_long(line: socket.socket) -> bytes:
    """Wait for a message sent with `send_long` and return it. Raises EOFError if the other side closed the
    connection.
    """
    num_bytes = int.from_bytes(_receive_packet(line), "little")
    parts: list[bytes] = []
    while num_bytes > 0:
        parts.append(_receive_packet(line))
        num_bytes -= len(parts[-1])
    return b"".join(parts)


def _receive_packet(line: socket.socket) -> bytes:
    data = line.recv(PACKET_BYTES)
    if not data:
        raise EOFError("the other side closed the connection")
    return data
