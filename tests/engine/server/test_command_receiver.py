"""Tests of the tasks that wait for the engine's thread while their client disconnects or returns."""

from __future__ import annotations

from kvscope_engine.server.command_receiver import ClientJoined, ClientLost, CommandReceiver
from kvscope_engine.server.service_limits import MIB, Bound, ServiceLimits
from kvscope_telemetry.messages.commands import Awaited, Failed, GetSnapshot, GetStatus, Refused, Submit
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo

SUBMIT = Submit(request_id="mine", prompt="hello")


def ready_receiver(limits: ServiceLimits | None = None) -> CommandReceiver:
    receiver = CommandReceiver(lambda: None, limits)
    receiver.ready(
        Hello(
            epoch=1,
            time_ns=0,
            wall_time_ns=0,
            model=ModelInfo(name="none"),
            cache=CacheInfo(num_blocks=1, block_size=16),
            device=DeviceInfo(kind="cpu"),
        )
    )
    return receiver


def waiting(receiver: CommandReceiver) -> list[tuple[bytes, object]]:
    tasks: list[tuple[bytes, object]] = []
    while (task := receiver.tasks.next(wait=False)) is not None:
        tasks.append(task)
    return tasks


def test_disconnection_of_a_client_is_handled_before_its_waiting_commands() -> None:
    receiver = ready_receiver()
    receiver.answer(b"a", SUBMIT)
    receiver.report_lost(b"a")
    assert isinstance(waiting(receiver)[0][1], ClientLost)


def test_lost_client_that_may_return_keeps_its_submissions_but_its_queries_are_refused() -> None:
    for may_return, kinds in ((False, [Refused, Failed]), (True, [Failed])):
        receiver = ready_receiver()
        receiver.answer(b"a", SUBMIT)
        receiver.answer(b"a", GetSnapshot(tag=1))
        assert [type(reply) for reply in receiver.refuse_lost(b"a", may_return=may_return)] == kinds
        assert waiting(receiver) == ([(b"a", SUBMIT)] if may_return else [])


def test_waiting_submission_moves_to_the_new_connection_but_the_disconnection_does_not() -> None:
    receiver = ready_receiver()
    receiver.answer(b"old", SUBMIT)
    receiver.report_lost(b"old")
    receiver.move(b"old", b"new")
    assert receiver.submits_of(b"new") == {"mine"}
    assert waiting(receiver) == [(b"new", SUBMIT)]


def test_introduction_of_a_reconnecting_client_is_accepted_even_if_the_queue_is_full() -> None:
    receiver = ready_receiver(ServiceLimits(all_commands=Bound(1, MIB)))
    receiver.answer(b"a", SUBMIT)
    hello = GetStatus(session="s", awaited=(Awaited(request_id="mine"),))
    assert receiver.enqueue_join(b"b", hello, "me") is None
    assert isinstance(receiver.enqueue_join(b"b", hello, "me"), Failed), "a second introduction counts like any command"
    joined = [task for client, task in waiting(receiver) if client == b"b"]
    assert joined == [ClientJoined("s", "me", hello.awaited)]
