"""The engine's clock may be wrong, but it does not jump."""

from __future__ import annotations

import pytest

from kvscope_telemetry.mirror.engine_clock import MAX_JUMP_NS, EngineClock

NOW = 10**12


@pytest.fixture
def clock() -> EngineClock:
    """Clock that read 5 s when ours read `NOW`."""
    clock = EngineClock()
    clock.start(7, 5_000_000_000, NOW)
    return clock


@pytest.mark.parametrize(
    ("passed_ns", "time_ns", "is_accepted"),
    [
        (0, 5_000_000_000, True),
        (10**16, 5_000_000_000 + 10**16, True),
        (0, 5_000_000_000 + MAX_JUMP_NS, True),
        (0, 5_000_000_001 + MAX_JUMP_NS, False),
        (10**16, 10**16 - MAX_JUMP_NS, False),
        (0, 2**62, False),
    ],
)
def test_time_is_accepted_within_a_day_of_the_time_passed(
    clock: EngineClock, passed_ns: int, time_ns: int, is_accepted: bool
) -> None:
    assert clock.accepts(7, time_ns, NOW + passed_ns) == is_accepted


def test_any_time_is_accepted_after_a_reconnect(clock: EngineClock) -> None:
    clock.reset()
    assert clock.accepts(7, 2**50, NOW)
    assert not clock.accepts(7, 5_000_000_000, NOW), "the time of the first message counts"


def test_any_engine_time_is_accepted_after_another_engine_start(clock: EngineClock) -> None:
    assert clock.accepts(8, 2**60, NOW)
