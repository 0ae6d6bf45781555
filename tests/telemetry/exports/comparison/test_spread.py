"""A steady run's halves are found equal about as often as is claimed, and what is different is found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvscope_telemetry.exports.comparison.spread import NUM_WINDOWS, Spread, Verdict, judge, spread_of

NUM_RUNS = 1_500


def steady(rng: np.random.Generator, length: int, memory_s: float) -> npt.NDArray[np.float64]:
    """Runs, shape (NUM_RUNS, length), whose seconds go with each other over `memory_s`."""
    stays = np.exp(-1 / memory_s) if memory_s else 0.0
    noise = rng.normal(size=(NUM_RUNS, length))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0] / np.sqrt(1 - stays**2)
    for second in range(1, length):
        values[:, second] = stays * values[:, second - 1] + noise[:, second]
    return values


def verdict(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> Verdict:
    spreads = [spread_of(np.array([part.mean() for part in np.array_split(each, NUM_WINDOWS)])) for each in (a, b)]
    return judge(float(a.mean()), float(b.mean()), *spreads).verdict


@pytest.mark.parametrize(("length_s", "memory_s"), [(60, 0), (300, 5), (300, 20), (1200, 20)])
def test_halves_of_a_steady_run_are_equal_in_19_of_20(length_s: int, memory_s: float) -> None:
    runs = steady(np.random.default_rng(length_s), 2 * length_s, memory_s)
    within = np.mean([verdict(run[:length_s], run[length_s:]) is Verdict.WITHIN for run in runs])
    assert 0.92 <= within <= 0.975


def test_a_difference_of_several_errors_is_found() -> None:
    runs = steady(np.random.default_rng(4), 600, 5)
    shift = 10 * runs.mean(axis=1).std()  # the difference of halves varies twice as much as the mean of both
    larger = np.mean([verdict(run[:300], run[300:] + shift) is Verdict.LARGER for run in runs])
    assert larger > 0.9


def test_how_many_times_it_is_larger() -> None:
    same = Spread(1.0, 5)
    judged = judge(10.0, 20.0, same, same)
    assert judged.within == pytest.approx(2.306 * np.sqrt(2))  # Student's t of 8 degrees of freedom
    assert judged.times == pytest.approx(10 / (2.306 * np.sqrt(2)))
    assert same.within == pytest.approx(2.776)


@pytest.mark.parametrize(
    ("a", "b", "of_a", "of_b", "expected"),
    [
        (1.0, None, Spread(1.0, 5), Spread(1.0, 5), Verdict.NONE),
        (1.0, 2.0, Spread(1.0, 5), Spread(None, 2), Verdict.UNTOLD),
        (1.0, 1.0, Spread(1.0, 5), Spread(None, 2), Verdict.EQUAL),
        (1.0, 1.0, Spread(0.0, 5), Spread(0.0, 5), Verdict.EQUAL),
        (1.0, 2.0, Spread(0.0, 5), Spread(0.0, 5), Verdict.LARGER),
        (0.0, 2.0, Spread(0.0, 5), Spread(2.0, 5), Verdict.WITHIN),
        (0.0, 9.0, Spread(0.0, 5), Spread(2.0, 5), Verdict.LARGER),
    ],
)
def test_verdicts(a: float, b: float | None, of_a: Spread, of_b: Spread, expected: Verdict) -> None:
    assert judge(a, b, of_a, of_b).verdict is expected


def test_windows_where_nothing_is_known_do_not_count() -> None:
    assert spread_of(np.array([1.0, np.nan, 2.0, 3.0])).num_windows == 3
    assert spread_of(np.array([1.0, np.nan, np.nan, 3.0])).standard_error is None
    assert spread_of(np.array([])).within is None
