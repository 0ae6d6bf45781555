"""Copied blocks equal their sources in every layer, and no other block changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.copy_blocks import copy_blocks, copy_blocks_torch

PAIRS = torch.tensor([[0, 5], [0, 2], [7, 1], [3, 8]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("block", [(2, 3, 16, 64), (2, 1, 7, 5), (1,)], ids=str)
def test_copies_in_every_layer(block: tuple[int, ...], dtype: torch.dtype, runner: Any) -> None:
    cache = torch.randint(0, 100, (3, 9, *block)).to(dtype).to(runner.device)
    expected = cache.clone()
    for source, destination in PAIRS.tolist():
        expected[:, destination] = expected[:, source]
    runner.ops.copy_blocks(cache, PAIRS.to(runner.device))
    assert torch.equal(cache, expected)


def test_layers_need_not_be_neighbours(runner: Any) -> None:
    """Storage of block, layer: both first axes are strided."""
    storage = torch.randn(9, 4, 2, 3, 16, 8).to(runner.device)
    cache = storage[:, ::2].transpose(0, 1)
    expected = storage.clone()
    for source, destination in PAIRS.tolist():
        expected[destination, ::2] = expected[source, ::2]
    runner.ops.copy_blocks(cache, PAIRS.to(runner.device))
    assert torch.equal(storage, expected)


def test_nothing_to_copy(runner: Any) -> None:
    cache = torch.randn(2, 4, 2, 8, device=runner.device)
    before = cache.clone()
    runner.ops.copy_blocks(cache, torch.empty(0, 2, dtype=torch.int64, device=runner.device))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("op", [copy_blocks, copy_blocks_torch])
@pytest.mark.parametrize(
    ("argument", "cache", "pairs"),
    [
        ("cache", torch.zeros(4, 9), PAIRS),
        ("cache", torch.zeros(2, 9, 3, 8)[..., ::2], PAIRS),
        ("pairs", torch.zeros(2, 9, 3, 8), PAIRS.int()),
        ("pairs", torch.zeros(2, 9, 3, 8), PAIRS[:, :1]),
        ("pairs", torch.zeros(2, 9, 3, 8), PAIRS.T.contiguous().T),
    ],
)
def test_bad_input_is_named(argument: str, cache: Any, pairs: Any, op: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=f"^{argument} is "):
        op(cache, pairs)
