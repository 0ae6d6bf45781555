"""Error rates of the comparison by simulation: false differences within one run, and missed real ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvscope_telemetry.exports.comparison.spread import (
    NUM_WINDOWS,
    FloatArray,
    JudgedDifference,
    Method,
    Verdict,
    judge,
)

NUM_RUNS = 800


def steady(rng: np.random.Generator, length: int, memory_s: float) -> npt.NDArray[np.float64]:
    """Return runs of shape (NUM_RUNS, length) with N(0, 1) seconds that are correlated over `memory_s`."""
    stays = np.exp(-1 / memory_s) if memory_s else 0.0
    noise = rng.normal(size=(NUM_RUNS, length))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for second in range(1, length):
        values[:, second] = stays * values[:, second - 1] + np.sqrt(1 - stays**2) * noise[:, second]
    return values


def latencies(rng: np.random.Generator, length: int, memory_s: float, sigma: float = 1.0) -> npt.NDArray[np.float64]:
    """Return latencies per second with a long tail."""
    return 0.2 * np.exp(sigma * steady(rng, length, memory_s))


def judged(a: FloatArray, b: FloatArray, *, is_ratio: bool) -> JudgedDifference:
    """Compare two runs by their medians (as for latencies) or by their means."""
    of = np.median if is_ratio else np.mean
    parts = [np.array([of(part) for part in np.array_split(each, NUM_WINDOWS)]) for each in (a, b)]
    return judge(float(of(a)), float(of(b)), *parts, is_ratio=is_ratio)


def share_different(runs: npt.NDArray[np.float64], times: float = 1.0, *, is_ratio: bool = True) -> float:
    """Return the share of runs whose second half, multiplied by `times`, is called different from the first."""
    half = runs.shape[1] // 2
    verdicts = [judged(run[:half], times * run[half:], is_ratio=is_ratio).verdict for run in runs]
    return float(np.mean([verdict is Verdict.DIFFERENT for verdict in verdicts]))


@pytest.mark.parametrize(("length_s", "memory_s"), [(60, 0), (300, 5), (1200, 20)])
def test_halves_of_one_run_are_called_different_in_under_8_percent(length_s: int, memory_s: float) -> None:
    rng = np.random.default_rng(length_s)
    assert share_different(latencies(rng, 2 * length_s, memory_s)) <= 0.075
    assert share_different(steady(rng, 2 * length_s, memory_s), is_ratio=False) <= 0.075


@pytest.mark.parametrize(("length_s", "memory_s", "sigma"), [(60, 0, 1.0), (300, 20, 1.0), (120, 5, 1.5)])
def test_fiftyfold_latency_is_always_detected(length_s: int, memory_s: float, sigma: float) -> None:
    """The result must not depend on correlation between seconds. A linear scale fails here because of the long
    tails.
    """
    runs = latencies(np.random.default_rng(50), 2 * length_s, memory_s, sigma)
    assert share_different(runs, 50.0) >= 0.995


def test_doubled_latency_is_mostly_detected_in_weakly_correlated_seconds() -> None:
    rng = np.random.default_rng(2)
    assert share_different(latencies(rng, 120, 0), 2.0) >= 0.7
    assert share_different(latencies(rng, 600, 5), 2.0) >= 0.5


def test_log_scale_detects_more_than_the_linear_scale() -> None:
    runs = latencies(np.random.default_rng(3), 240, 5, 1.5)
    half = runs.shape[1] // 2
    linear = [judge_linear(run[:half], 50.0 * run[half:]) for run in runs]
    assert np.mean(linear) < 0.6 < 0.99 < share_different(runs, 50.0)


def judge_linear(a: FloatArray, b: FloatArray) -> bool:
    parts = [np.array([np.median(part) for part in np.array_split(each, NUM_WINDOWS)]) for each in (a, b)]
    found = judge(float(np.median(a)), float(np.median(b)), *parts, is_ratio=False)
    return found.verdict is Verdict.DIFFERENT


def test_growing_and_steady_latencies_differ_significantly_only_on_a_log_scale() -> None:
    """11.8 s against 238 ms: on a linear scale, the error of the first exceeds the difference."""
    grows, does_not = np.array([0.2, 3.0, 11.8, 20.0, 30.0]), np.array([0.22, 0.24, 0.238, 0.25, 0.23])
    found = judge(11.8, 0.238, grows, does_not, is_ratio=True)
    assert found.verdict is Verdict.DIFFERENT
    assert found.test is Method.RATIO
    assert (found.num_a, found.num_b) == (5, 5)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.238 / 11.8 < found.high < 0.5
    assert judge(11.8, 0.238, grows, does_not, is_ratio=False).verdict is Verdict.OPEN


def test_confidence_interval_uses_student_t() -> None:
    of_a, of_b = np.array([9.0, 10.0, 11.0]), np.array([19.0, 20.0, 21.0])
    found = judge(10.0, 20.0, of_a, of_b, is_ratio=False)
    near = 2.776 * np.sqrt(2 / 3)  # Student's t for 4 degrees of freedom
    assert found.low == pytest.approx(10 - near)
    assert found.high == pytest.approx(10 + near)


_STEADY, _FEW = np.ones(5), np.array([1.0, np.nan])
_WIDE = np.array([0.0, 1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("a", "b", "of_a", "of_b", "expected"),
    [
        (1.0, None, _STEADY, _STEADY, Verdict.NONE),
        (1.0, 2.0, _STEADY, _FEW, Verdict.UNKNOWN),
        (1.0, 1.0, _STEADY, _FEW, Verdict.EQUAL),
        (1.0, 1.0, _STEADY, _STEADY, Verdict.EQUAL),
        (1.0, 2.0, _STEADY, 2 * _STEADY, Verdict.DIFFERENT),
        (0.0, 1.0, 0 * _STEADY, _WIDE, Verdict.OPEN),
        (0.0, 9.0, 0 * _STEADY, _WIDE + 7, Verdict.DIFFERENT),
    ],
)
def test_comparison_verdict_depends_on_difference_and_amount_of_data(
    a: float, b: float | None, of_a: FloatArray, of_b: FloatArray, expected: Verdict
) -> None:
    assert judge(a, b, of_a, of_b, is_ratio=True).verdict is expected


def test_values_that_may_be_zero_are_compared_by_difference() -> None:
    assert judge(1.0, 2.0, _WIDE, _WIDE, is_ratio=True).test is Method.DIFFERENCE
    assert judge(1.0, 2.0, _WIDE + 1, _WIDE + 1, is_ratio=True).test is Method.RATIO


def test_comparison_windows_without_values_do_not_count() -> None:
    found = judge(1.0, 2.0, np.array([1.0, np.nan, 2.0, 3.0]), np.array([1.0, np.nan]), is_ratio=True)
    assert (found.num_a, found.num_b, found.low) == (3, 1, None)
