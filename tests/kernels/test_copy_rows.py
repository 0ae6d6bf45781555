"""Rows are copied to their targets in every tensor, and nowhere else."""

from typing import Any

import pytest
import torch

from kvscope_kernels.copy_rows import copy_rows_torch, copy_tensors, row_tensors

NUM_BLOCKS = 7


def pool_tensors(device: str) -> list[torch.Tensor]:
    """Return tensors of an 8-bit pool with two layers: rows of 1, 300 and 1,100 words of 8 bytes, and scales."""
    shapes = {torch.uint8: ((2, 4), (2, 3, 4, 100)), torch.int16: ((2, 2200),), torch.float32: ((2, 3, 4),)}
    return [
        torch.randint(0, 100, (NUM_BLOCKS, *shape)).to(dtype).to(device)
        for dtype, many in shapes.items()
        for shape in many
    ]


@pytest.mark.parametrize("pairs", [[(1, 5)], [(0, 6), (3, 2), (0, 4)], [(-1, -1), (6, 0)], [(-1, 3)]], ids=str)
def test_cache_rows_are_copied_in_every_tensor_and_nowhere_else(pairs: list[tuple[int, int]], runner: Any) -> None:
    pool = pool_tensors(runner.device)
    expected = [tensor.cpu().clone() for tensor in pool]
    for tensor in expected:
        for source, target in pairs:
            if source >= 0:
                tensor[target] = tensor[source]
    runner.ops.copy_rows(row_tensors(pool), torch.tensor(pairs, dtype=torch.int64, device=runner.device))
    for tensor, wanted in zip(pool, expected, strict=True):
        assert torch.equal(tensor.cpu(), wanted)


def test_empty_list_copies_nothing(runner: Any) -> None:
    pool = pool_tensors(runner.device)
    before = [tensor.clone() for tensor in pool]
    runner.ops.copy_rows(row_tensors(pool), torch.empty(0, 2, dtype=torch.int64, device=runner.device))
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(pool, before, strict=True))


def test_copying_cache_rows_names_an_invalid_argument() -> None:
    rows = row_tensors(pool_tensors("cpu"))
    for pairs in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"pairs is .*: \(n, 2\) int64"):
            copy_rows_torch(rows, pairs)
    with pytest.raises(ValueError, match="contiguous"):
        copy_rows_torch(row_tensors([torch.zeros(4, 6).t()]), torch.zeros(1, 2, dtype=torch.int64))


def test_rows_that_are_no_whole_words_are_copied() -> None:
    pytest.importorskip("triton")
    odd = torch.arange(12, dtype=torch.uint8).view(4, 3)
    copy_tensors([odd], torch.tensor([[0, 2]]))
    assert odd[:3].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
