"""The queue before the publisher: bounded, newest wins."""

from __future__ import annotations

import threading

from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage
from kvscope_telemetry.transport.server_sockets import Outbox


def frame(seq: int, num_rows: int = 0) -> Frame:
    return Frame(epoch=1, seq=seq, step=seq, time_ns=0, blocks=BlockRows(state=b"\0" * num_rows))


def seqs(messages: list[TelemetryMessage]) -> list[int]:
    return [message.seq for message in messages if isinstance(message, Frame)]


def test_outgoing_messages_leave_the_queue_once_and_in_order() -> None:
    outbox = Outbox(10, 1 << 20)
    for seq in range(10):
        outbox.put(frame(seq))
    assert seqs(outbox.drain()) == list(range(10))
    assert outbox.drain() == []
    assert outbox.num_dropped == 0


def test_oldest_outgoing_messages_are_dropped_beyond_the_maximum_number() -> None:
    outbox = Outbox(10, 1 << 20)
    for seq in range(25):
        outbox.put(frame(seq))
    assert seqs(outbox.drain()) == list(range(15, 25))
    assert outbox.num_dropped == 15


def test_oldest_outgoing_messages_are_dropped_beyond_the_maximum_bytes_but_never_the_last() -> None:
    outbox = Outbox(10, 100_000)
    for seq in range(5):
        outbox.put(frame(seq, num_rows=1_000))  # about 30 KB
    assert seqs(outbox.drain()) == [2, 3, 4]
    outbox.put(frame(7, num_rows=1_000_000))
    assert seqs(outbox.drain()) == [7]


def test_concurrent_puts_lose_and_repeat_nothing() -> None:
    outbox = Outbox(1 << 20, 1 << 30)
    taken: list[int] = []

    def put(start: int) -> None:
        for seq in range(start, start + 5_000):
            outbox.put(frame(seq))

    threads = [threading.Thread(target=put, args=(start,)) for start in (0, 10_000)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += seqs(outbox.drain())
    taken += seqs(outbox.drain())
    assert sorted(taken) == [*range(5_000), *range(10_000, 15_000)]
