"""Linear layers with grouped weights on a CPU, from grouped.c, grouped_float.c and grouped_tiles.c. Defines the
memory layout of these weights.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvscope_kernels.cpu.library import GroupedStruct, library
from kvscope_kernels.cpu.product import NativeProduct
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.quantized_linear.grouped_weight import CHUNK, GroupedWeight

PANEL: Final = 32
"""Number of output rows that are interleaved in the weight layout."""
_TINY: Final = 1e-30


class NativeGrouped(NativeProduct):
    """A grouped weight in the memory layout for this CPU, with its matmul.

    By default, activations are not rounded, and the result equals that of the dequantized weight except for the order
    of float32 sums. With `rounds_activations`, activations are rounded to 8 bits in groups of CHUNK. Raises
    RuntimeError without a compiled library (`library`).
    """

    def __init__(
        self,
        weight: GroupedWeight,
        bias: Tensor | None = None,
        buffer: WeightBuffer | None = None,
        *,
        rounds_activations: bool = False,
    ) -> None:
        """Pack `weight`, in memory from `buffer` if given, which is shared with other weights."""
        self.function = "kvscope_grouped" if rounds_activations else "kvscope_grouped_float"
        native = library()
        if native is None:
            raise RuntimeError("weights of 4 bits need a C compiler on a Linux machine (cc, gcc or clang)")
        self.outputs, self.inputs = weight.codes.shape
        self._codes, self._scales_and_lows = (
            _store_packed(part, buffer) for part in (_packed_codes(weight), _packed_scales_and_lows(weight))
        )
        panels, chunks = len(self._scales_and_lows), -(-self.inputs // CHUNK)
        self._bias = None if bias is None else pad(bias.detach().float(), (0, panels * PANEL - self.outputs))
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        pointers = (self._codes.data_ptr(), self._scales_and_lows.data_ptr(), bias_pointer)
        sizes = (self.outputs, self.inputs, chunks, weight.group // CHUNK)
        parts = GroupedStruct(*pointers, *sizes, weight.bits, self._scales_and_lows.dtype == torch.float16)
        self._set_weight(native, parts, self._codes, self._scales_and_lows, self._bias)


def min_tile_rows() -> int:
    """Return the number of rows of bfloat16 from which matmuls with unrounded activations use the tile instructions of
    AMX; 0 if they never do. The result has the same bits for any number of rows.
    """
    native = library()
    return 0 if native is None else int(native.kvscope_min_tile_rows())


def native_product_torch(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Return the result of `NativeGrouped.product` with rounded activations, computed in float64."""
    wide = pad(x.double(), (0, -x.shape[-1] % CHUNK)).view(*x.shape[:-1], -1, CHUNK)
    scale = (wide.abs().amax(-1, keepdim=True) / 127.0).clamp_min(_TINY)
    rounded = ((wide / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]
    return torch.matmul(rounded, weight.widened().double().T)


def _packed_codes(weight: GroupedWeight) -> Tensor:
    """Pack the codes in the layout of grouped.h.

    Returns uint8 [panels, inputs / 4, 64] with two 4-bit codes each, or [panels, inputs / 4, PANEL * 4] with one 8-bit
    code each.
    """
    rows, columns = (-size % part for size, part in zip(weight.codes.shape, (PANEL, CHUNK), strict=True))
    codes = pad(weight.codes, (0, columns, 0, rows))
    quads = codes.view(len(codes) // PANEL, PANEL, -1, 4).transpose(1, 2)  # (panels, inputs / 4, PANEL, 4)
    if weight.bits == 8:
        return quads.flatten(2).contiguous()
    return torch.add(quads[:, :, : PANEL // 2], quads[:, :, PANEL // 2 :] * 16).flatten(2).contiguous()


def _store_packed(packed: Tensor, buffer: WeightBuffer | None) -> Tensor:
    return packed if buffer is None else buffer.allocate(tuple(packed.shape), packed.dtype).copy_(packed)


def _packed_scales_and_lows(weight: GroupedWeight) -> Tensor:
    """Pack the scale and the low (the value of code 0) of each group, with the outputs of a panel next to each other.

    Returns [panels, groups, 2, PANEL] in the dtype of `scale_and_low`: PANEL scales, then the lows of the same outputs.
    """
    scale_and_low = torch.stack(weight.scale_and_low, -1)  # (outputs, groups, 2)
    padded = pad(scale_and_low, (0, 0, 0, 0, 0, -len(scale_and_low) % PANEL))
    return padded.view(len(padded) // PANEL, PANEL, -1, 2).permute(0, 2, 3, 1).contiguous()
