"""Commands in turn by client, within bounds, and a stop that is heard at once."""

from __future__ import annotations

import threading

import pytest

from kvscope_engine.server.allowance import Allowance
from kvscope_engine.server.command_queue import CommandQueue
from kvscope_engine.server.limits import Bound, ServiceLimits


def taken(queue: CommandQueue[str]) -> list[str]:
    works = []
    while (errand := queue.next(wait=False)) is not None:
        works.append(errand[1])
    return works


def test_clients_take_turns_and_each_one_s_order_is_kept() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    for number in range(4):
        queue.put(b"a", f"a{number}", 10)
    queue.put(b"b", "b0", 10)
    queue.put(b"c", "c0", 10)
    queue.put(b"b", "b1", 10)
    assert taken(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_what_is_left_of_an_errand_waits_for_the_others_but_for_nothing_of_its_own() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    for client in (b"a", b"a", b"b"):
        queue.put(client, f"{client.decode()} next", 10)
    assert queue.next(wait=False) == (b"a", "a next")
    queue.put_back(b"a", "a rest")
    assert taken(queue) == ["b next", "a rest", "a next"]


def test_bounds_count_commands_and_bytes_and_free_what_was_taken() -> None:
    limits = ServiceLimits(client_commands=Bound(2, 100), all_commands=Bound(10, 150))
    queue: CommandQueue[str] = CommandQueue(limits)
    assert queue.put(b"a", "1", 90) == ""
    assert "limit of 100 for a client" in queue.put(b"a", "2", 20)
    assert "limit of 150 for all clients" in queue.put(b"b", "3", 70)
    assert queue.put(b"a", "4", 10) == ""
    assert "2 commands wait already" in queue.put(b"a", "5", 0 + 1)
    assert queue.take_if(b"a", lambda work: True) == ["1", "4"]
    assert queue.put(b"b", "6", 70) == ""
    assert taken(queue) == ["6"]


@pytest.mark.parametrize("how", ["put", "stop"])
def test_who_waits_is_woken(how: str) -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(queue.next(wait=True)))
    thread.start()
    if how == "put":
        queue.put(b"a", "work", 1)
    else:
        queue.stop()
    thread.join(timeout=20)
    assert got == [(b"a", "work") if how == "put" else None]


def test_a_stop_before_anybody_waits_is_not_missed() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    queue.stop()
    assert queue.next(wait=True) is None
    queue.put(b"a", "late", 1)
    assert queue.next(wait=True) == (b"a", "late"), "what waits can still be refused by name"


def test_an_allowance_forgets_clients_that_hold_nothing() -> None:
    allowance = Allowance("things are held", Bound(5, 100), Bound(50, 1000))
    for number in range(1_000):
        client = str(number).encode()
        assert allowance.take(client, 10, 2) == ""
        allowance.give(client, 10, 2)
    assert allowance.total == (0, 0)
    assert not allowance._held
