"""Sampling by exponential races: frequencies follow the weights, and are the same in every batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_engine.model.layers.sampling.sampler import first_largest
from kvscope_kernels.logits.draw_tokens import draw
from kvscope_kernels.logits.random_numbers import keys
from kvscope_kernels.logits.token_filter import sums


def some_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(keys([seed] * count, range(count)))


@pytest.mark.parametrize("size", [1, 5, 256, 257, 1000])
def test_tokens_are_drawn_as_often_as_their_weights_say(size: int) -> None:
    """Chi-square test with a fixed seed, across and within chunks, including tokens with zero weight."""
    count, rng = 40_000, np.random.default_rng(size)
    weights = rng.exponential(size=size).astype(np.float32)
    weights[rng.random(size) < 0.3] = 0.0
    weights[-1] = 1.0
    found = draw(torch.from_numpy(weights).expand(count, -1), some_keys(count)).bincount(minlength=size).numpy()
    assert found[weights == 0.0].sum() == 0
    expected = count * weights.astype(np.float64) / weights.sum(dtype=np.float64)
    is_often = expected >= 5.0
    counts = np.array([*found[is_often], found[~is_often].sum()], np.float64)
    wanted = np.array([*expected[is_often], expected[~is_often].sum()])
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = float(((counts - wanted) ** 2 / wanted).sum())
    assert chi_square <= freedom + 4.0 * (2.0 * freedom) ** 0.5


def test_drawn_token_does_not_depend_on_the_batch_or_the_number_of_threads() -> None:
    weights = torch.rand(37, 5000, generator=torch.Generator().manual_seed(1)).pow(8)
    tokens, before = draw(weights, some_keys(37)), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (torch.arange(5, 17), torch.tensor([36, 0, 20]), torch.randperm(37)):
                assert torch.equal(draw(weights[rows], some_keys(37)[rows]), tokens[rows])
            alone = [draw(weights[row : row + 1], some_keys(37)[row : row + 1]) for row in range(37)]
            assert torch.equal(torch.cat(alone), tokens)
    finally:
        torch.set_num_threads(before)


def test_removing_a_token_changes_only_samples_within_its_vocabulary_chunk() -> None:
    """With a cumulative sum, it would change all draws behind it."""
    weights = torch.rand(3000, 2560, generator=torch.Generator().manual_seed(1))
    without = weights.clone()
    without[:, 300] = 0.0
    before, after = draw(weights, some_keys(3000)), draw(without, some_keys(3000))
    moved = before != after
    assert bool((before[moved] // 256 == 1).all())
    assert float(moved.float().mean()) < 0.01


def test_token_with_weight_zero_is_never_drawn() -> None:
    weights = torch.zeros(2, 600)
    weights[0, [300, 310]] = 1e-30
    weights[1, [0, 599]] = torch.tensor([1.0, 1e-20])
    for seed in range(50):
        first, second = draw(weights, some_keys(2, seed)).tolist()
        assert first in (300, 310)
        assert second in (0, 599)


@pytest.mark.parametrize("size", [1, 256, 300, 1024])
def test_first_largest_returns_the_first_of_equal_values(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(size).integers(-3, 3, (40, size)).astype(np.float32))
    assert first_largest(values).tolist() == [row.index(max(row)) for row in values.tolist()]
    assert torch.equal(sums(values), values.double().sum(-1))
