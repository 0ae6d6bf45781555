"""Forecast of when free blocks run out: given only if they clearly fall."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_telemetry.alarms.alarm_figures import forecast_at
from kvscope_telemetry.alarms.forecast import seconds_left
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

TIMES = np.arange(15.0)


def test_steadily_falling_free_blocks_are_extrapolated_to_a_time_when_none_is_left() -> None:
    assert seconds_left(TIMES, 500 - 10 * TIMES, 1000) == pytest.approx(36.0)


def test_noise_and_a_single_jump_change_the_forecast_little() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        room = 500 - 10 * TIMES + rng.normal(0, 3, 15)
        assert seconds_left(TIMES, room, 1000) == pytest.approx(36.0, rel=0.2)
    jumped = 500 - 10 * TIMES + np.where(TIMES >= 12, -60, 0)  # one large request was admitted
    left_s = seconds_left(TIMES, jumped, 1000)
    assert left_s is not None
    assert left_s > 18  # the first and the last value alone would give 13 blocks per second


@pytest.mark.parametrize(
    "room",
    [
        np.full(15, 100.0),
        100 + 5 * TIMES,
        100 + 40 * (TIMES % 2),
        np.where(TIMES < 7, 400, 300),  # one step down, then constant
        np.where(TIMES < 12, 500 - 10 * TIMES, 900),  # a large request ended
        100_000 - 0.5 * TIMES,
        np.zeros(15),
        np.where(TIMES == 4, np.nan, 500 - 10 * TIMES),
    ],
    ids=["level", "rising", "noise", "one step", "just freed", "far away", "gone", "unknown"],
)
def test_no_forecast_without_a_clear_fall(room: np.ndarray) -> None:
    assert seconds_left(TIMES, room, 1000) is None


def test_no_forecast_from_too_few_seconds() -> None:
    assert seconds_left(TIMES[:7], 500 - 10 * TIMES[:7], 1000) is None
    assert seconds_left(np.array([]), np.array([]), 1000) is None
    gap = np.where(TIMES < 10, TIMES, TIMES + 20)
    assert seconds_left(gap, 500 - 10 * gap, 1000) is None


def test_pure_noise_almost_never_gives_a_forecast() -> None:
    rng = np.random.default_rng(1)
    said = [seconds_left(TIMES, 300 + rng.normal(0, 30, 15), 1000) for _ in range(2000)]
    assert sum(left is not None for left in said) <= 10


def test_run_out_forecast_uses_only_seconds_since_the_last_engine_restart() -> None:
    overview = SessionOverview()
    summaries = [
        Summary(time_ns=s * SECOND_NS, epoch=1 if s < 20 else 2, active_blocks=10 * s, free_blocks=600 - 10 * s)
        for s in range(1, 40)
    ]
    overview.extend(summaries)
    assert forecast_at(overview, 16 * SECOND_NS) == pytest.approx(45.0)
    assert forecast_at(overview, 25 * SECOND_NS) is None  # only five seconds since the engine's restart
    assert forecast_at(overview, 40 * SECOND_NS) == pytest.approx(21.0)
    assert forecast_at(overview, 51 * SECOND_NS) is None
    assert forecast_at(overview, 0) is None
    assert forecast_at(SessionOverview(), 0) is None
