"""The bytes of the block pool on the device: one packed tensor a layer.

Owns the layout, NHD `[blocks, 2, block_size, heads, dim]` on a CPU and HND `[blocks, 2, heads, block_size, dim]`
on a GPU; who uses a block, and why, it must not know. Everybody else sees the logical views
`(num_blocks, block_size, heads, dim)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvscope_telemetry.errors import KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.loader import LoadedModel

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and head dimension of one layer. Keys and values are stored at the larger of their two sizes."""

    num_kv_heads: int
    head_dim: int


class KVStorage:
    """Keys and values of every block and layer.

    Raises KvscopeError with the sizes when the device has no room for it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = device
        self.block_bytes = block_bytes(self.layers, block_size, dtype)
        self._packed = self._allocate()
        self._views = [_logical_views(packed, _is_hnd(device)) for packed in self._packed]

    @classmethod
    def for_model(cls, loaded: LoadedModel, num_blocks: int, block_size: int) -> KVStorage:
        """Storage whose layers are those that the model's attention was seen to use."""
        from kvscope_engine.model.hook_check import check_hook

        layers = [layer.shape for layer in check_hook(loaded.module)]
        return cls(num_blocks, block_size, layers, loaded.dtype, loaded.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that a block is made of, each contiguous with the blocks first."""
        return tuple(self._packed)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (num_blocks, block_size, heads, dim)."""
        return self._views[layer]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer][1]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer; all are read before any is written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for packed in self._packed:
            packed.index_copy_(0, targets, packed.index_select(0, sources))

    def close(self) -> None:
        """Give the memory back; the storage holds nothing afterwards."""
        self._views.clear()
        self._packed.clear()

    def _allocate(self) -> list[torch.Tensor]:
        """Not written to, so that a CPU hands out pages only as blocks are used; operations never read free slots."""
        try:
            return [
                torch.empty(
                    _packed_shape(self.num_blocks, self.block_size, layer, _is_hnd(self.device)),
                    dtype=self.dtype,
                    device=self.device,
                )
                for layer in self.layers
            ]
        except (RuntimeError, MemoryError) as error:  # torch tells of memory by RuntimeError
            raise KvscopeError(
                f"no memory for the KV cache: {self.num_blocks} blocks of {self.block_bytes / MIB:.2f} MiB are"
                f" {self.num_bytes / MIB:.0f} MiB on {self.device} ({str(error).splitlines()[0]:.120});"
                " give a smaller --kv-memory or --num-gpu-blocks-override"
            ) from error


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    numbers = sum(layer.num_kv_heads * layer.head_dim for layer in layers)
    return 2 * block_size * numbers * dtype.itemsize


def _is_hnd(device: torch.device) -> bool:
    return device.type == "cuda"


def _packed_shape(num_blocks: int, block_size: int, layer: LayerShape, hnd: bool) -> tuple[int, ...]:
    if hnd:
        return (num_blocks, 2, layer.num_kv_heads, block_size, layer.head_dim)
    return (num_blocks, 2, block_size, layer.num_kv_heads, layer.head_dim)


def _logical_views(packed: torch.Tensor, hnd: bool) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = packed.unbind(1)
    return (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)
