"""Copies whole blocks within the pool (copy-on-write of shared blocks), in one launch per step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.triton_language import cdiv, jit_varying, require_triton, tl

WORD_BYTES = 8
_TILE_WORDS = 1024


class RowTensors(NamedTuple):
    """Tensors whose row b belongs to block b, and their addresses for the kernel. The memory of the tensors
    must not move.
    """

    tensors: tuple[Tensor, ...]
    """Contiguous tensors (num_blocks, ...)."""
    addresses: Tensor
    """(num_tensors,) int64 addresses."""
    row_words: Tensor
    """(num_tensors,) int64, number of 8-byte words per row."""
    max_row_words: int
    is_whole: bool
    """Whether the rows of all tensors are multiples of 8 bytes."""


def row_tensors(tensors: Sequence[Tensor]) -> RowTensors:
    """Copy the addresses of tensors to the tensors' device. Call it once for tensors that stay at their addresses."""
    words = [tensor[:1].nbytes // WORD_BYTES for tensor in tensors]
    columns = ([tensor.data_ptr() for tensor in tensors], words)
    addresses, row_words = (torch.tensor(each, dtype=torch.int64).to(tensors[0].device) for each in columns)
    is_whole = all(tensor[:1].nbytes % WORD_BYTES == 0 for tensor in tensors)
    return RowTensors(tuple(tensors), addresses, row_words, max(words), is_whole)


def copy_rows(rows: RowTensors, pairs: Tensor) -> None:
    """For each (source, target) of `pairs` and each tensor, set tensor[target] = tensor[source], in place, in one
    launch.

    If a row size is not a multiple of 8 bytes, the torch reference copies the rows.

    Args:
        rows: Tensors from `row_tensors`.
        pairs: (n, 2) int64 on the tensors' device; a source of -1 copies nothing. No row may be both source and target,
            or target twice, because copies run in any order.

    Raises:
        ValueError: Unsupported arguments.

    Source: copy-on-write of shared blocks (arXiv 2309.06180, section 4.4), whose kernel copies block by block and layer
    by layer.
    """
    _check(rows, pairs)
    require_triton()
    if not rows.is_whole:
        copy_rows_torch(rows, pairs)
    elif len(pairs):
        grid = (len(pairs), len(rows.tensors), cdiv(rows.max_row_words, _TILE_WORDS))
        _copy_rows_kernel[grid](rows.addresses, rows.row_words, pairs, TILE=_TILE_WORDS, num_warps=4)


@jit_varying(pointers=("pairs",))
def _copy_rows_kernel(addresses: tl.tensor, row_words: tl.tensor, pairs: tl.tensor, TILE: tl.constexpr) -> None:
    """One program: one pair, one tensor, TILE 8-byte words of the tensor's row."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair)
    target = tl.load(pairs + 2 * pair + 1)
    if source < 0:
        return
    words = tl.load(row_words + tl.program_id(1))
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    content = tl.load(base + source * words + word, mask=word < words)
    tl.store(base + target * words + word, content, mask=word < words)


def copy_rows_torch(rows: RowTensors, pairs: Tensor) -> None:
    """Reference of `copy_rows`, and the implementation for CPUs. It reads all rows before it writes any."""
    _check(rows, pairs)
    copied_pairs = pairs[pairs[:, 0] >= 0]
    sources, targets = copied_pairs.unbind(1)
    for tensor in rows.tensors:
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def copy_tensors(tensors: Sequence[Tensor], pairs: Tensor) -> None:
    """Run `copy_rows` once, for callers without `RowTensors`."""
    copy_rows(row_tensors(tensors), pairs)


def _check(rows: RowTensors, pairs: Tensor) -> None:
    accepted = pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.dtype == torch.int64 and pairs.is_contiguous()
    require(accepted, "pairs", pairs, "(n, 2) int64, contiguous,")
    require(pairs.device == rows.addresses.device, "pairs", pairs, f"the device {rows.addresses.device}")
    for tensor in rows.tensors:
        if not tensor.is_contiguous() or tensor.dim() < 1:
            require(False, "rows", tensor, "(num_blocks, ...), contiguous,")
