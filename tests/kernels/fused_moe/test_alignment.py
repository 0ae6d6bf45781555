"""Pairs ordered by expert: every pair is in exactly one tile of its expert."""

from typing import Any

import pytest
import torch

from kvscope_kernels.fused_moe.alignment import align_experts, align_experts_torch, max_tiles


@pytest.mark.interpreter
@pytest.mark.parametrize("tile_m", [16, 64])
@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (6, 8), (1200, 5), (37, 60)])
def test_token_expert_pairs_are_ordered_by_expert_as_in_the_reference(
    interpret: Any, num_pairs: int, num_experts: int, tile_m: int
) -> None:
    ids = torch.randint(0, num_experts, (num_pairs,), generator=torch.Generator().manual_seed(num_pairs))
    ids[ids == 3] = 0  # one expert has no pairs, another many
    assert_same(interpret, ids, num_experts, tile_m)


@pytest.mark.interpreter
def test_token_pair_with_an_invalid_expert_is_in_no_tile(interpret: Any) -> None:
    ids = torch.tensor([4, -1, 0, 7, 4, 99, 2, 5], dtype=torch.int32)
    assert_same(interpret, ids, 5, 16)


@pytest.mark.interpreter
def test_tokens_routed_to_a_single_expert_are_ordered_as_in_the_reference(interpret: Any) -> None:
    for expert in (0, 3):
        assert_same(interpret, torch.full((70,), expert), 4, 16)


def assert_same(interpret: Any, ids: torch.Tensor, num_experts: int, tile_m: int) -> None:
    found, expected = interpret(align_experts, ids, num_experts, tile_m), align_experts_torch(ids, num_experts, tile_m)
    assert found.experts.tolist() == expected.experts.tolist()
    used = (expected.experts >= 0).repeat_interleave(tile_m)
    assert found.pairs[used].tolist() == expected.pairs[used].tolist()


def test_maximum_number_of_expert_tiles_is_that_of_the_worst_distribution() -> None:
    for num_pairs in (1, 7, 40, 129):
        for num_experts in (1, 3, 64):
            worst = max(
                sum(-(-count // 16) for count in counts)
                for counts in (_counts_of_one(num_pairs, num_experts), _even_counts(num_pairs, num_experts))
            )
            assert worst == max_tiles(num_pairs, num_experts, 16)


def _counts_of_one(num_pairs: int, num_experts: int) -> list[int]:
    """Return as many experts with one pair as possible and the rest in another, which makes the most tiles."""
    ones = min(num_pairs, num_experts) - 1
    return [1] * ones + [num_pairs - ones]


def _even_counts(num_pairs: int, num_experts: int) -> list[int]:
    return [len(range(start, num_pairs, num_experts)) for start in range(num_experts)]
