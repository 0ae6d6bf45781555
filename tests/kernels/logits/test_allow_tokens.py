"""Masks leave only allowed tokens in their rows, and other rows are unchanged."""

from typing import Any

import pytest
import torch

from kvscope_kernels.logits.allow_tokens import allow_tokens_torch


def packed_mask(allowed: torch.Tensor) -> torch.Tensor:
    """Return an (n, words) int32 mask of (n, vocabulary) bool, with everything beyond the vocabulary allowed."""
    n, vocabulary = allowed.shape
    bits = torch.ones(n, -(-vocabulary // 32) * 32, dtype=torch.int64)
    bits[:, :vocabulary] = allowed
    words = (bits.view(n, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 1000, 2049])
def test_token_mask_sets_all_other_logits_to_minus_infinity(runner: Any, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary, generator=generator)
    rows = [3, 0, 4]
    allowed = torch.rand(len(rows), vocabulary, generator=generator) < 0.3
    expected = logits.clone()
    for row, mask in zip(rows, allowed, strict=True):
        expected[row, ~mask] = -torch.inf
    found = logits.to(runner.device)
    device = runner.device
    runner.ops.allow_tokens(found, torch.tensor(rows, device=device), packed_mask(allowed).to(device))
    assert torch.equal(found.cpu(), expected)


def test_mask_words_beyond_the_vocabulary_are_not_read(runner: Any) -> None:
    logits = torch.zeros(1, 40).to(runner.device)
    words = torch.tensor([[-1, -1, 0, 0]], dtype=torch.int32, device=runner.device)
    runner.ops.allow_tokens(logits, torch.zeros(1, dtype=torch.int64, device=runner.device), words)
    assert torch.equal(logits.cpu(), torch.zeros(1, 40))


def test_token_mask_kernel_names_an_invalid_argument() -> None:
    rows, words = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="logits is"):
        allow_tokens_torch(torch.zeros(2, 64, dtype=torch.float16), rows, words)
    with pytest.raises(ValueError, match="rows is"):
        allow_tokens_torch(torch.zeros(2, 64), rows.int(), words)
    with pytest.raises(ValueError, match="allowed is"):
        allow_tokens_torch(torch.zeros(2, 65), rows, words)
