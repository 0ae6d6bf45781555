"""What waits for the engine's thread when its client goes or comes back."""

from __future__ import annotations

from kvscope_engine.server.command_desk import CommandDesk
from kvscope_engine.server.limits import MIB, Bound, ServiceLimits
from kvscope_engine.server.work import Joined, Lost
from kvscope_telemetry.messages.commands import Awaited, Failed, GetSnapshot, GetStatus, Refused, Submit
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, ModelInfo

SUBMIT = Submit(request_id="mine", prompt="hello")


def ready_desk(limits: ServiceLimits | None = None) -> CommandDesk:
    desk = CommandDesk(lambda: None, limits)
    desk.ready(
        Hello(
            epoch=1,
            time_ns=0,
            wall_time_ns=0,
            model=ModelInfo(name="none"),
            cache=CacheInfo(num_blocks=1, block_size=16),
            device=DeviceInfo(kind="cpu"),
        )
    )
    return desk


def waiting(desk: CommandDesk) -> list[tuple[bytes, object]]:
    works: list[tuple[bytes, object]] = []
    while (errand := desk.next_command(wait=False)) is not None:
        works.append(errand)
    return works


def test_a_loss_is_heard_before_the_commands_of_who_is_lost() -> None:
    desk = ready_desk()
    desk.take(b"a", SUBMIT)
    desk.lose(b"a")
    assert isinstance(waiting(desk)[0][1], Lost)


def test_who_is_gone_for_good_is_refused_all_and_who_may_return_its_questions() -> None:
    for may_return, kinds in ((False, [Refused, Failed]), (True, [Failed])):
        desk = ready_desk()
        desk.take(b"a", SUBMIT)
        desk.take(b"a", GetSnapshot(tag=1))
        assert [type(reply) for reply in desk.refuse_lost(b"a", may_return=may_return)] == kinds
        assert waiting(desk) == ([(b"a", SUBMIT)] if may_return else [])


def test_a_submission_that_waits_goes_over_and_the_loss_of_its_connection_does_not() -> None:
    desk = ready_desk()
    desk.take(b"old", SUBMIT)
    desk.lose(b"old")
    desk.move(b"old", b"new")
    assert desk.submits_of(b"new") == {"mine"}
    assert waiting(desk) == [(b"new", SUBMIT)]


def test_an_introduction_is_taken_however_much_the_others_wait_for() -> None:
    desk = ready_desk(ServiceLimits(all_commands=Bound(1, MIB)))
    desk.take(b"a", SUBMIT)
    hello = GetStatus(session="s", awaited=(Awaited(request_id="mine"),))
    assert desk.join(b"b", hello, "me") is None
    assert isinstance(desk.join(b"b", hello, "me"), Failed), "a second one at once counts as any command does"
    joined = [work for client, work in waiting(desk) if client == b"b"]
    assert joined == [Joined("s", "me", hello.awaited)]
