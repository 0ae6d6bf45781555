"""One replay: what a publisher still has, from one sequence number on, in the old layout or the new.

A socket each, so that answers that come after somebody stopped waiting are nobody's.
"""

from __future__ import annotations

import contextlib
from typing import Final

import zmq

from kvscope_telemetry.kv_events.addresses import is_ipv6
from kvscope_telemetry.kv_events.batches import END_SEQ
from kvscope_telemetry.kv_events.wire import MAX_BATCH_BYTES

HIGH_WATER: Final = 256
"""Answers that wait here; publishers before vLLM 0.26 drop what is more than a thousand behind."""
NEW_PARTS: Final = 4
OLD_PARTS: Final = 3
SEQ_BYTES: Final = 8


class ReplayClient:
    """Asks `endpoint` for all batches from `start` on."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> None:
        self.is_over = False
        """Whether the end was said."""
        self.num_foreign = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.rcvhwm = HIGH_WATER
        self.socket.maxmsgsize = MAX_BATCH_BYTES
        self.socket.linger = 0
        self.socket.ipv6 = is_ipv6(endpoint)
        self.socket.connect(endpoint)
        self.socket.send_multipart((b"", start.to_bytes(SEQ_BYTES, "big")), zmq.NOBLOCK)

    def receive(self, max_answers: int) -> list[tuple[int, bytes]]:
        """Batches that came, in the order in which they were sent."""
        answers: list[tuple[int, bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(answers) < max_answers and not self.is_over:
                answer = read_answer(self.socket.recv_multipart(zmq.NOBLOCK))
                if answer is None:
                    self.num_foreign += 1
                elif answer[0] is None:
                    self.is_over = True
                else:
                    answers.append((answer[0], answer[1]))
        return answers

    def close(self) -> None:
        """Stop waiting."""
        self.socket.close(linger=0)


def read_answer(parts: list[bytes]) -> tuple[int | None, bytes] | None:
    """Sequence number and payload, (None, b"") at the end of a replay, None for what is no answer.

    Four parts since vLLM 0.26 and SGLang 0.5.23: nothing, topic, number, payload; three without a topic before.
    """
    if len(parts) not in (NEW_PARTS, OLD_PARTS) or parts[0] or len(parts[-2]) != SEQ_BYTES:
        return None
    if parts[-2] == END_SEQ:
        return None, b""
    return int.from_bytes(parts[-2], "big"), parts[-1]


def read_published(parts: list[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload of a published message, None for what is none: topic, number, payload."""
    if len(parts) != OLD_PARTS or len(parts[1]) != SEQ_BYTES or parts[1] == END_SEQ:
        return None
    return int.from_bytes(parts[1], "big"), parts[2]
