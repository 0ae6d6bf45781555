"""Replies to clients that are slow, gone, or well."""

from __future__ import annotations

from kvscope_telemetry.transport.reply_sender import Delivery, ReplyBacklogs


class FakeWire:
    """Sends to clients as long as they have capacity."""

    def __init__(self, **room: int) -> None:
        self.room = {name.encode(): room for name, room in room.items()}
        self.sent: list[tuple[bytes, bytes]] = []
        self.lost: list[bytes] = []

    def send(self, client: bytes, data: bytes) -> Delivery:
        if client not in self.room:
            return Delivery.GONE
        if not self.room[client]:
            return Delivery.FULL
        self.room[client] -= 1
        self.sent.append((client, data))
        return Delivery.SENT


def test_client_that_reads_has_no_backlog() -> None:
    wire = FakeWire(a=9)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append)
    backlogs.add(b"a", b"1")
    assert wire.sent == [(b"a", b"1")]
    assert backlogs.is_empty


def test_slow_client_gets_its_replies_later_in_order_without_delaying_others() -> None:
    wire = FakeWire(slow=1, fast=9)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append)
    for number in range(4):
        backlogs.add(b"slow", b"%d" % number)
    backlogs.add(b"fast", b"f")
    assert wire.sent == [(b"slow", b"0"), (b"fast", b"f")]
    assert not backlogs.retry()
    wire.room[b"slow"] = 2
    assert backlogs.retry()
    wire.room[b"slow"] = 2
    assert backlogs.retry()
    assert [data for client, data in wire.sent if client == b"slow"] == [b"0", b"1", b"2", b"3"]
    assert backlogs.is_empty
    assert wire.lost == []


def test_client_that_disconnected_is_reported_once_and_its_replies_are_dropped() -> None:
    wire = FakeWire()
    backlogs = ReplyBacklogs(wire.send, wire.lost.append)
    backlogs.add(b"a", b"1")
    assert wire.lost == [b"a"]
    assert backlogs.is_empty


def test_overfull_backlog_of_a_client_is_dropped_and_reported() -> None:
    wire = FakeWire(slow=0)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append, max_bytes=1_000)
    backlogs.add(b"slow", b"x" * 600)
    assert wire.lost == []
    backlogs.add(b"slow", b"y" * 600)
    assert wire.lost == [b"slow"]
    backlogs.add(b"slow", b"the last word")
    wire.room[b"slow"] = 9
    backlogs.retry()
    assert wire.sent == [(b"slow", b"the last word")]


def test_single_reply_larger_than_the_backlog_limit_is_sent() -> None:
    wire = FakeWire(slow=0)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append, max_bytes=10)
    backlogs.add(b"slow", b"x" * 600)
    wire.room[b"slow"] = 1
    assert backlogs.retry()
    assert wire.lost == []


def test_total_backlog_is_bounded_and_the_longest_is_dropped() -> None:
    wire = FakeWire(a=0, b=0, c=0)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append, max_bytes=10_000, max_total_bytes=12_000)
    for number in range(9):
        backlogs.add(b"a", b"x" * 900)
        backlogs.add(b"b" if number < 2 else b"c", b"y" * 100)
    assert wire.lost == []
    for _ in range(10):
        backlogs.add(b"c", b"y" * 100)
    assert wire.lost == [b"a"]
    assert backlogs.num_bytes == 19 * 200
    wire.room.update({b"b": 100, b"c": 100})
    backlogs.retry()
    assert (backlogs.num_bytes, backlogs.is_empty) == (0, True)


def test_reply_backlog_has_no_capacity_for_a_large_reply_while_too_much_waits() -> None:
    wire = FakeWire(a=0)
    backlogs = ReplyBacklogs(wire.send, wire.lost.append)
    assert backlogs.has_capacity(b"a", 1 << 30), "a single reply always fits"
    backlogs.add(b"a", b"x" * (10 << 20))
    assert backlogs.has_capacity(b"a", 5 << 20)
    assert not backlogs.has_capacity(b"a", 7 << 20)
