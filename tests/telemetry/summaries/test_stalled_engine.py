"""How long no step has ended, by heartbeats, and how long the oldest request waits."""

from __future__ import annotations

from msgspec.structs import replace

from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.summaries.summarizer import Stall

HALF_NS = 500_000_000


def beats(count: int, step: int = 5, first: int = 0, **more: object) -> list[Heartbeat]:
    fields: dict[str, object] = {"num_unfinished": 3, **more}
    beat = Heartbeat(epoch=1, time_ns=0, seq=1, step=step)
    return [replace(beat, time_ns=(first + n) * HALF_NS, **fields) for n in range(count)]


def stall_times(beats: list[Heartbeat]) -> list[float]:
    stall = Stall()
    return [stall.update(beat) for beat in beats]


def test_stall_grows_until_a_step_ends() -> None:
    assert stall_times(beats(5)) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert stall_times([*beats(4), *beats(2, step=6, first=4)]) == [0.0, 0.5, 1.0, 1.5, 0.0, 0.5]


def test_idle_or_paused_engine_does_not_stall() -> None:
    assert set(stall_times(beats(20, num_unfinished=0))) == {0.0}
    assert set(stall_times(beats(20, paused_by="somebody"))) == {0.0}
    assert stall_times([*beats(6, paused_by="somebody"), *beats(3, first=6)])[-3:] == [0.5, 1.0, 1.5]


def test_time_without_heartbeats_does_not_count_as_a_stall() -> None:
    assert stall_times([*beats(3), *beats(3, first=60)]) == [0.0, 0.5, 1.0, 1.0, 1.5, 2.0]


def test_stall_starts_over_with_another_engine() -> None:
    assert stall_times([*beats(3), replace(beats(1)[0], epoch=2, time_ns=9)]) == [0.0, 0.5, 1.0, 0.0]
