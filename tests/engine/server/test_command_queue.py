"""The command queue: fair to clients, bounded, and stopped immediately."""

from __future__ import annotations

import threading

import pytest

from kvscope_engine.server.command_receiver import CommandQueue, OnBehalfOf
from kvscope_engine.server.service_limits import Allowance, Bound, ServiceLimits, refusal_text


def drained(queue: CommandQueue[str]) -> list[str]:
    works = []
    while (task := queue.next(wait=False)) is not None:
        works.append(task[1])
    return works


def test_clients_are_served_round_robin_and_each_in_order() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    for number in range(4):
        queue.append(b"a", f"a{number}", 10)
    queue.append(b"b", "b0", 10)
    queue.append(b"c", "c0", 10)
    queue.append(b"b", "b1", 10)
    assert drained(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_rest_of_a_command_runs_after_other_clients_but_before_the_next_of_its_client() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    for client in (b"a", b"a", b"b"):
        queue.append(client, f"{client.decode()} next", 10)
    assert queue.next(wait=False) == (b"a", "a next")
    queue.requeue(b"a", "a rest")
    assert drained(queue) == ["b next", "a rest", "a next"]


def test_waiting_commands_are_limited_in_number_and_bytes_per_client_and_in_total() -> None:
    limits = ServiceLimits(client_commands=Bound(2, 100), all_commands=Bound(10, 150))
    queue: CommandQueue[str] = CommandQueue(limits)
    assert queue.append(b"a", "1", 90) == ""
    assert "limit of 100 for a client" in queue.append(b"a", "2", 20)
    assert "limit of 150 for all clients" in queue.append(b"b", "3", 70)
    assert queue.append(b"a", "4", 10) == ""
    assert "2 commands wait already" in queue.append(b"a", "5", 0 + 1)
    assert queue.remove_if(b"a", lambda work: True) == ["1", "4"]
    assert queue.append(b"b", "6", 70) == ""
    assert drained(queue) == ["6"]


def test_commands_of_a_reconnected_client_run_before_those_of_its_new_connection() -> None:
    limits = ServiceLimits(client_commands=Bound(3, 100), all_commands=Bound(10, 1000))
    queue: CommandQueue[str] = CommandQueue(limits)
    for client, work in ((b"old", "1"), (b"new", "3"), (b"old", "2"), (b"other", "x")):
        assert queue.append(client, work, 10) == ""
    queue.move(b"old", b"new")
    assert queue.tasks_of(b"new") == ["1", "2", "3"]
    assert not queue.has(b"old")
    assert "3 commands wait already" in queue.append(b"new", "4", 10)
    assert sorted(drained(queue)) == ["1", "2", "3", "x"]
    assert queue.append(b"new", "5", 100) == ""


def test_command_put_first_runs_before_others_of_its_client_even_if_the_queue_is_full() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits(client_commands=Bound(1, 100)))
    queue.append(b"a", "1", 10)
    queue.prepend(b"a", "0")
    assert queue.remove_if(b"a", lambda work: work == "2") == []
    assert drained(queue) == ["0", "1"]


@pytest.mark.parametrize("how", ["put", "stop"])
def test_thread_waiting_for_commands_is_woken_by_a_command_or_by_stop(how: str) -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(queue.next(wait=True)))
    thread.start()
    if how == "put":
        queue.append(b"a", "work", 1)
    else:
        queue.stop()
    thread.join(timeout=60)
    assert got == [(b"a", "work") if how == "put" else None]


def test_command_queue_stopped_before_a_wait_returns_at_once() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    queue.stop()
    assert queue.next(wait=True) is None
    queue.append(b"a", "late", 1)
    assert queue.next(wait=True) == (b"a", "late"), "waiting commands can still be refused by name"


def test_usage_limits_keep_no_entry_for_clients_without_usage() -> None:
    allowance = Allowance("things are held", Bound(5, 100), Bound(50, 1000))
    for number in range(1_000):
        client = str(number).encode()
        assert allowance.acquire(client, 10, 2) == ""
        allowance.release(client, 10, 2)
    assert allowance.total == (0, 0)
    assert not allowance._usage


def test_usage_counted_against_limits_moves_completely_to_the_new_connection() -> None:
    allowance = Allowance("things are held", Bound(5, 100), Bound(50, 1000))
    assert not allowance.acquire(b"old", 40, 3)
    assert not allowance.acquire(b"new", 40, 2)
    allowance.move(b"old", b"new")
    assert (allowance.usage(b"old"), allowance.usage(b"new"), allowance.total) == ((0, 0), (5, 80), (5, 80))
    assert "5 things are held already" in allowance.acquire(b"new", 1)
    allowance.release(b"new", 80, 5)
    assert (allowance.usage(b"new"), allowance.total) == ((0, 0), (0, 0))


def test_end_users_of_a_client_and_their_batches_are_served_round_robin() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits())
    for number in range(3):
        for batch in ("x", "y"):
            queue.append(b"api", f"much {batch}{number}", 10, OnBehalfOf("much", batch))
    queue.append(b"api", "little", 10, OnBehalfOf("little", "z"))
    queue.append(b"api", "its own", 10)
    queue.append(b"other", "other", 10)
    ours = [work for work in drained(queue) if work != "other"]
    assert ours == ["its own", "much x0", "little", "much y0", "much x1", "much y1", "much x2", "much y2"]


def test_end_users_of_a_client_are_bounded_separately_and_move_with_it() -> None:
    queue: CommandQueue[str] = CommandQueue(ServiceLimits(client_commands=Bound(2, 100)))
    one, other = OnBehalfOf("one", "a"), OnBehalfOf("other", "a")
    assert [queue.append(b"old", work, 10, one) for work in "12"] == ["", ""]
    assert "2 commands wait already" in queue.append(b"old", "3", 10, one)
    assert queue.append(b"old", "4", 10, other) == ""
    queue.append(b"new", "5", 10, other)
    queue.move(b"old", b"new")
    assert queue.tasks_of(b"new") == ["1", "2", "4", "5"]
    assert queue.remove_if(b"new", lambda work: work == "4") == ["4"]
    assert drained(queue) == ["1", "5", "2"]
    assert queue.append(b"new", "6", 100, one) == ""


def test_command_larger_than_a_limit_is_refused_as_never_possible() -> None:
    allowance = Allowance("things are held", Bound(5, 100), Bound(50, 1000))
    for count, num_bytes in ((6, 1), (1, 101)):
        reason = allowance.acquire(b"a", num_bytes, count)
        assert refusal_text(reason) == reason
        assert "can never be served" in reason
    assert not allowance.acquire(b"a", 100)
    assert refusal_text(allowance.acquire(b"a", 1)).startswith("the engine is behind: 1 things are held already")
