"""Counter-based random numbers are repeatable, independent of the batch, and distributed as Exp(1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvscope_kernels.logits.random_numbers import exponentials, keys


def random_numbers(seeds: list[int], positions: list[int], count: int = 1) -> torch.Tensor:
    return exponentials(torch.from_numpy(keys(seeds, positions)), count)


def test_numbers_depend_only_on_their_seed_and_position() -> None:
    many = random_numbers([5, -1, 7, 1 << 70], [0, 3, 9, 2], 300)
    assert torch.equal(random_numbers([7], [9], 300)[0], many[2])
    assert torch.equal(random_numbers([-1], [3], 300)[0], many[1])
    assert torch.equal(random_numbers([7], [9], 7)[0], many[2, :7])
    assert len({*many.flatten().tolist(), *random_numbers([5, 5, 6], [1, 2, 0], 300).flatten().tolist()}) == 7 * 300
    assert len(set(keys(range(100), range(100)).tolist())) == 100


def test_random_numbers_for_sampling_equal_those_of_earlier_versions() -> None:
    """A recorded seed must give the same tokens in later versions."""
    assert keys([0, 1, -5], [0, 1, 1000]).tolist() == [-6411193824288604561, -1041056189838986770, -4514190654881455282]
    found = random_numbers([0, 1, -5], [0, 1, 1000], 2).flatten().tolist()
    assert found == pytest.approx(
        [
            0.07998735214228761,
            1.6986275348343525,
            2.0579348847224255,
            0.5981583088248748,
            0.026685433326994808,
            0.5106618971195879,
        ],
        rel=1e-12,
    )


@pytest.mark.parametrize("along", ["seeds", "positions", "counter"])
def test_numbers_are_distributed_exponentially(along: str) -> None:
    count = 20_000
    if along == "seeds":
        found = random_numbers(list(range(count)), [0] * count)[:, 0]
    elif along == "positions":
        found = random_numbers([3] * count, list(range(count)))[:, 0]
    else:
        found = random_numbers([3], [5], count)[0]
    assert float(found.min()) > 0.0
    uniforms = (-torch.expm1(-found)).numpy()
    histogram = np.histogram(uniforms, bins=20, range=(0.0, 1.0))[0]
    chi_square = float(((histogram - count / 20) ** 2 / (count / 20)).sum())
    assert chi_square < 44.0  # 19 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.03
