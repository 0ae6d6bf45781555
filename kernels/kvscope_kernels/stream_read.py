"""Pure memory read, to measure the upper limit for the bandwidth of any kernel."""

import torch
from torch import Tensor

from kvscope_kernels.checks import require
from kvscope_kernels.launch import num_multiprocessors
from kvscope_kernels.triton_language import cdiv, jit, require_triton, tl

_TILE = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 8


def stream_read(data: Tensor, sums: Tensor) -> None:
    """Sum `data` as int32 words with wraparound, into as many partial sums as `sums` has.

    Args:
        data: (n,) int32, contiguous.
        sums: Output, (m,) int32; their sum is the sum of data. The assignment of words to sums is unspecified.
    """
    _check(data, sums)
    require_triton()
    per_program = cdiv(cdiv(len(data), _TILE), len(sums)) * _TILE
    _stream_read_kernel[(len(sums),)](data, sums, len(data), per_program, TILE=_TILE, num_warps=8)


def sums_for(data: Tensor) -> Tensor:
    """Return an uninitialized tensor with one sum for each program of a launch that fills the device."""
    return data.new_empty(num_multiprocessors(data.device) * _PROGRAMS_PER_MULTIPROCESSOR)


@jit
def _stream_read_kernel(
    data: tl.tensor, sums: tl.tensor, num_words: tl.tensor, per_program: tl.tensor, TILE: tl.constexpr
) -> None:
    """Each program sums one contiguous range of words."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILE], tl.int32)
    for start in range(0, per_program, TILE):
        word = program * per_program + start + tl.arange(0, TILE)
        total += tl.load(data + word, mask=word < num_words, other=0)
    tl.store(sums + program, tl.sum(total, 0))


def stream_read_torch(data: Tensor, sums: Tensor) -> None:
    """Reference of `stream_read`. It writes the total to the first element of `sums`, and 0 to all others."""
    _check(data, sums)
    sums.zero_()
    sums[0] = data.sum(dtype=torch.int64).to(torch.int32)


def _check(data: Tensor, sums: Tensor) -> None:
    for name, words in (("data", data), ("sums", sums)):
        is_valid = words.dim() == 1 and words.dtype == torch.int32 and words.is_contiguous() and len(words) > 0
        require(is_valid, name, words, "(n,) int32, contiguous, not empty")
