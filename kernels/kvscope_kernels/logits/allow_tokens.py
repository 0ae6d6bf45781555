"""Grammar mask: sets the logits of tokens that are not allowed next to -inf, in one launch for a batch."""

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.triton_language import cdiv, jit_varying, require_triton, tl

WORD_BITS = 32
_TILE = 1024


def allow_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Set logits[rows[i], token] = -inf for each `token` whose bit in allowed[i] is 0, in place, in one launch.

    Args:
        logits: (num_rows, vocabulary) float32, contiguous.
        rows: (n,) int64, distinct.
        allowed: (n, words) int32, contiguous; bit token % 32 of word token // 32, for at least `vocabulary` tokens.

    Raises:
        ValueError: Unsupported arguments.

    Source: XGrammar (arXiv 2411.15100), whose masks have this layout.
    """
    _check(logits, rows, allowed)
    require_triton()
    if len(rows):
        grid = (len(rows), cdiv(logits.shape[1], _TILE))
        _allow_tokens_kernel[grid](logits, rows, allowed, logits.shape[1], allowed.shape[1], TILE=_TILE, num_warps=4)


@jit_varying(numbers=("vocabulary", "words"), pointers=("logits", "rows", "allowed"))
def _allow_tokens_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    allowed: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Each program masks TILE tokens of one row."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocabulary
    word = tl.load(allowed + index * words + token // 32, mask=inside, other=0)
    is_refused = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * vocabulary + token, float("-inf"), mask=inside & is_refused)


def allow_tokens_torch(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Reference of `allow_tokens`, and the implementation for CPUs."""
    _check(logits, rows, allowed)
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=allowed.device)
    octets = allowed.view(torch.uint8)  # little-endian words: octets are in the order of tokens
    is_refused = (octets[:, :, None] & bits).eq(0).view(len(allowed), -1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_refused, -torch.inf))


def _check(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        require(False, "logits", logits, "(num_rows, vocabulary) float32, contiguous,")
    if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != logits.device:
        require(False, "rows", rows, "(n,) int64 on the device of logits")
    num_words = cdiv(logits.shape[1], WORD_BITS)
    fits = allowed.dim() == 2 and allowed.shape[0] == len(rows) and allowed.shape[1] >= num_words
    if not fits or allowed.dtype != torch.int32 or not allowed.is_contiguous() or allowed.device != logits.device:
        require(False, "allowed", allowed, f"({len(rows)}, {num_words} or more) int32, contiguous, beside logits,")
