"""Drawing by inverse of the cumulative sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.sampling.token_draw import draw
from kvscope_engine.model.sampling.vocabulary_pieces import first_largest, sums


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 1000])
def test_draw_equals_a_search_in_the_cumulative_sum(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.random((50, size)).astype(np.float32)
    weights[rng.random((50, size)) < 0.5] = 0.0
    weights[np.arange(50), rng.integers(0, size, 50)] = 1.0
    uniforms = rng.random(50)
    cumulative = weights.astype(np.float64).cumsum(1)
    expected = [int(np.searchsorted(c, u * c[-1], "right")) for c, u in zip(cumulative, uniforms, strict=True)]
    assert draw(torch.from_numpy(weights), torch.from_numpy(uniforms)).tolist() == expected


def test_the_ends_of_the_interval_never_draw_weight_zero() -> None:
    weights = torch.zeros(2, 600)
    weights[0, [300, 310]] = 1e-30
    weights[1, [0, 599]] = torch.tensor([1.0, 1e-20])
    for uniform in (0.0, 0.5, 1.0 - 2**-53):
        first, second = draw(weights, torch.full((2,), uniform, dtype=torch.float64)).tolist()
        assert first in (300, 310)
        assert second in (0, 599)


def test_frequencies_follow_the_weights() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 5.0]]).expand(8000, -1)
    uniforms = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    assert draw(weights, uniforms).bincount(minlength=4).tolist() == [1000, 0, 2000, 5000]


@pytest.mark.parametrize("size", [1, 256, 300, 1024])
def test_first_largest_takes_the_first_of_equals(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(size).integers(-3, 3, (40, size)).astype(np.float32))
    assert first_largest(values).tolist() == [row.index(max(row)) for row in values.tolist()]
    assert torch.equal(sums(values), values.double().sum(-1))
