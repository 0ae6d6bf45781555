"""When requests come: all at once, as a Poisson process, in bursts, as a beat; the last is where the rate has it."""

from __future__ import annotations

import itertools
import statistics

import pytest

from kvscope_engine.bench.serving.rounds import arrivals


def variation(times_s: list[float]) -> float:
    """Deviation of the gaps over their mean."""
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times_s])]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


def test_all_at_once() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, float("inf")])
def test_the_last_comes_where_the_rate_has_it(burstiness: float) -> None:
    times_s = arrivals(50, 10.0, burstiness, 3)
    assert times_s[-1] == pytest.approx(5.0)
    assert times_s == sorted(times_s)
    assert min(times_s) > 0


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    assert variation(arrivals(4000, 1.0, 1.0, 0)) == pytest.approx(1.0, abs=0.1)
    assert variation(arrivals(4000, 1.0, 4.0, 0)) == pytest.approx(0.5, abs=0.1)
    assert variation(arrivals(4000, 1.0, 0.25, 0)) == pytest.approx(2.0, abs=0.3)
    assert variation(arrivals(10, 1.0, float("inf"), 0)) == pytest.approx(0.0, abs=1e-9)


def test_a_seed_is_a_course() -> None:
    assert arrivals(20, 2.0, 1.0, 7) == arrivals(20, 2.0, 1.0, 7)
    assert arrivals(20, 2.0, 1.0, 7) != arrivals(20, 2.0, 1.0, 8)
