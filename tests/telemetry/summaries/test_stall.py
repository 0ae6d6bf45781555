"""How long no step ended, by heartbeats; and how long the oldest request waits."""

from __future__ import annotations

from msgspec.structs import replace

from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.summaries.summarizer import Stall

HALF_NS = 500_000_000


def beats(count: int, step: int = 5, first: int = 0, **more: object) -> list[Heartbeat]:
    fields: dict[str, object] = {"num_unfinished": 3, **more}
    beat = Heartbeat(epoch=1, time_ns=0, seq=1, step=step)
    return [replace(beat, time_ns=(first + n) * HALF_NS, **fields) for n in range(count)]


def seen(beats: list[Heartbeat]) -> list[float]:
    stall = Stall()
    return [stall.update(beat) for beat in beats]


def test_grows_while_a_step_does_not_end() -> None:
    assert seen(beats(5)) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert seen([*beats(4), *beats(2, step=6, first=4)]) == [0.0, 0.5, 1.0, 1.5, 0.0, 0.5]


def test_nothing_to_do_and_steps_that_are_held_are_no_stall() -> None:
    assert set(seen(beats(20, num_unfinished=0))) == {0.0}
    assert set(seen(beats(20, paused_by="somebody"))) == {0.0}
    assert seen([*beats(6, paused_by="somebody"), *beats(3, first=6)])[-3:] == [0.5, 1.0, 1.5]


def test_a_process_that_had_no_time_at_all_is_not_stuck() -> None:
    assert seen([*beats(3), *beats(3, first=60)]) == [0.0, 0.5, 1.0, 1.0, 1.5, 2.0]


def test_another_engine_start() -> None:
    assert seen([*beats(3), replace(beats(1)[0], epoch=2, time_ns=9)]) == [0.0, 0.5, 1.0, 0.0]
