"""Uniform numbers by counter: repeatable, independent of the batch, evenly spread."""

from __future__ import annotations

import numpy as np

from kvscope_engine.model.sampling.random_numbers import uniforms


def test_a_number_depends_on_its_seed_and_position_alone() -> None:
    many = uniforms([5, -1, 7, 1 << 70], [0, 3, 9, 2])
    assert uniforms([7], [9])[0] == many[2]
    assert uniforms([-1], [3])[0] == many[1]
    assert len({*many, *uniforms([5, 5, 6], [1, 2, 0])}) == 7
    assert len(set(uniforms(range(100), range(100)))) == 100


def test_golden_values_do_not_change() -> None:
    """A recorded seed must give its tokens again in a later version."""
    np.testing.assert_array_equal(
        uniforms([0, 1, -5], [0, 1, 1000]), [0.6524484863740322, 0.9435642308648544, 0.7552852342481882]
    )


def test_numbers_fill_the_interval_evenly_over_seeds_and_over_positions() -> None:
    count = 20_000
    for seeds, positions in ((range(count), [0] * count), ([3] * count, range(count))):
        numbers = uniforms(list(seeds), list(positions))
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        histogram = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
        chi_square = float(((histogram - count / 20) ** 2 / (count / 20)).sum())
        assert chi_square < 44.0  # 19 degrees of freedom, 0.1 %
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
