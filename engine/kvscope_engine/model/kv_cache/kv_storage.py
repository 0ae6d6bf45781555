"""The bytes of the block pool on the device: one packed tensor a layer, and one of scales when it is quantized.
Layers that choose among their blocks have bounds of their keys beside them, one row a block like all else. Layers of
several KV groups share tensors, one of each group: a block is of one group at a time.

Owns the layout, NHD `[blocks, 2, block_size, heads, dim]` on a CPU and HND `[blocks, 2, heads, block_size, dim]`
on a GPU, with 1 in place of 2 for latents; who uses a block, and why, it must not know. Everybody else sees the logical
views `(num_blocks, block_size, heads, dim)` and, of scales, `(num_blocks, block_size, heads)`; who moves whole blocks
takes `block_tensors`, so that data, scales and bounds travel together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvscope_kernels.copy_rows import RowTensors, row_tensors
from kvscope_kernels.kv_formats import LARGEST, as_bytes
from kvscope_telemetry.errors import BadInput, KvscopeError

if TYPE_CHECKING:
    from kvscope_engine.model.kv_cache.virtual_memory.paged_memory import PagedMemory

MIB = 1 << 20
QUANTIZED_DTYPES: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
SCALE_DTYPE: Final = torch.float32
"""4 bytes beside each vector of 64 or 128. float16 would save 2 of them, and lose vectors whose largest number is
below 4e-6 or blur those below 8e-3, which are its subnormals; every scale of a bfloat16 activation is a float32."""


@dataclass(frozen=True, slots=True)
class TokenPart:
    """One tensor that a layer keeps of each token, where a model is run by its own code (`own_forward`)."""

    name: str
    """`key`, `value`, or `index`: an indexer's key."""
    shape: tuple[int, ...]
    """Of one token: heads and numbers of each, or numbers alone."""
    dtype: torch.dtype

    def numbers(self, stored: torch.dtype) -> int:
        """That its bytes take in a storage of `stored`."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes % stored.itemsize:
            raise BadInput(f"its {self.name}s of {num_bytes} bytes a token are not kept in {stored}")
        return num_bytes // stored.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and head dimension of one layer. Keys and values are stored at the larger of their two sizes."""

    num_kv_heads: int
    head_dim: int
    bounds_dtype: torch.dtype | None = None
    """Of the smallest and the largest key of each block, where these are kept with it: that of the activations."""
    latent_dim: int = 0
    """Of a layer of latents (MLA): how many of a token's `head_dim` numbers are its latent; a rotary key is the rest,
    and there are no values beside them."""
    shares_with: int | None = None
    """The layer whose keys and values it reads, which are held once; None: it has its own."""
    parts: tuple[TokenPart, ...] = ()
    """What a token's `head_dim` numbers are, side by side, where the model is run by its own code; none otherwise."""

    @property
    def vectors(self) -> int:
        """Of a token and head: a key and a value, or one that is all."""
        return 1 if self.latent_dim or self.parts else 2

    @property
    def numbers(self) -> int:
        """A token."""
        return self.vectors * self.num_kv_heads * self.head_dim

    @property
    def multiplied(self) -> int:
        """Numbers that attention multiplies for one query head and one token: of the key, and of the value."""
        widths = [part.shape[-1] for part in self.parts if part.name != "index"] or [self.head_dim]
        return sum(widths) + (self.latent_dim or (0 if self.parts else self.head_dim))

    def index_bytes(self, stored: torch.dtype) -> int:
        """Of a token, that an indexer keeps, in a storage of `stored`."""
        return sum(part.numbers(stored) * stored.itemsize for part in self.parts if part.name == "index")


class LayerKV(NamedTuple):
    """Keys and values of a layer, each (num_blocks, block_size, heads, dim), and their scales without dim, or None.

    Of a layer of latents keys are all that is stored, and values their first numbers, the latents; `v_scale` is that
    of these, and `k_scale` that of the rotary keys behind them."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    bounds: torch.Tensor | None = None
    """(num_blocks, 2, heads, dim): the smallest and the largest key of each block; None where none are kept."""
    group: int = 0
    """KV group, by whose block tables it is read."""
    is_shared: bool = False
    """Whether another layer writes them, before this one in each step."""


class KVStorage:
    """Keys and values of every block and layer, in `memory` where that is given: there not every block has some.

    `groups` are the layers of each KV group that keep KV of their own (None: all are in one). Layers at one place in
    their groups share a tensor, whose rows are as long as the longest of them needs.
    Raises KvscopeError with the sizes when the device has no room for it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        memory: PagedMemory | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(layers)
        self._sharing = layers_by_tensor(self.layers, groups)
        self._place = {layer: place for place, sharing in enumerate(self._sharing) for layer in sharing}
        self._group = {layer: group for group, own in enumerate(groups or ()) for layer in own}
        self.num_groups = len(groups or (None,))
        self.dtype = dtype
        self.device = device
        self.block_bytes = block_bytes(self.layers, block_size, dtype, groups)
        self._memory = memory
        self._packed, self._scales, self._bounds = self._allocate()
        self._views = [self._layer_view(layer) for layer in range(len(self.layers))]
        self._rows: RowTensors | None = row_tensors(self.block_tensors) if self.layers else None

    @property
    def num_bytes(self) -> int:
        """Bytes that all blocks may take together."""
        return self.num_blocks * self.block_bytes if self._memory is None else self._memory.num_bytes

    def resident_bytes(self) -> int:
        """Bytes of `memory` behind blocks now, measured; -1 without it, where nobody can tell."""
        return -1 if self._memory is None else self._memory.resident_bytes()

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a block is made of: tensors whose row b holds bytes of block b, each row one run of memory.

        Copying row b of every one of them copies block b, its scales and bounds included. Types are such that a CPU
        can index.
        """
        return (*map(as_bytes, self._packed), *self._scales, *self._bounds.values())

    @property
    def rows(self) -> RowTensors:
        """The same, as copies inside the pool find them."""
        assert self._rows is not None, "the storage is closed, or holds no layers"
        return self._rows

    @property
    def bounds_tokens(self) -> float:
        """Tokens whose keys and values are as many bytes as the bounds of a block; 0 where none are kept."""
        for layer in self.layers:
            if layer.bounds_dtype is not None:
                *token, bounds = tensor_block_bytes([layer], 1, self.dtype)
                return bounds / sum(token)
        return 0.0

    def layer(self, layer: int) -> LayerKV:
        """Keys, values and their scales of a layer."""
        return self._views[layer]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (num_blocks, block_size, heads, dim)."""
        return self._views[layer][:2]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer].k

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer].v

    def rows_of_tokens(self, layer: int) -> torch.Tensor:
        """(num_blocks, block_size, numbers) of a layer of `parts`."""
        assert self.layers[layer].parts, "other layers have a row for each head"
        return self._views[layer].k.squeeze(2)

    def close(self) -> None:
        """Give the memory back; the storage holds nothing afterwards."""
        self._views.clear()
        self._rows = None
        self._packed.clear()
        self._scales.clear()
        self._bounds.clear()
        if self._memory is not None:
            self._memory.close()

    def _layer_view(self, layer: int) -> LayerKV:
        source = self.layers[layer].shares_with
        if source is not None:
            return self._layer_view(source)._replace(is_shared=True)
        hnd, place, form = is_hnd(self.device), self._place[layer], self.layers[layer]
        shape = _packed_shape(self.num_blocks, self.block_size, form, hnd)
        packed, group = _first_of_rows(self._packed[place], shape), self._group.get(layer, 0)
        k_scale = v_scale = None
        if self._scales:
            k_scale, v_scale = _logical_views(_first_of_rows(self._scales[place], _scale_shape(shape)), hnd)
        if form.latent_dim or form.parts:
            stored = packed.squeeze(1)
            stored = stored.transpose(1, 2) if hnd else stored
            return LayerKV(stored, stored[..., : form.latent_dim], k_scale, v_scale, group=group)
        k, v = _logical_views(packed, hnd)
        return LayerKV(k, v, k_scale, v_scale, self._bounds.get(layer), group)

    def _allocate(self) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor]]:
        """Data and, if quantized, scales of layers that share a tensor, and by layer the bounds of those that have any.

        Not written to, so that a CPU hands out pages only as blocks are used; operations never read free slots.
        """
        hnd = is_hnd(self.device)
        packed = [_packed_shape(self.num_blocks, self.block_size, layer, hnd) for layer in self.layers]
        shapes = [_shape_for([packed[layer] for layer in sharing]) for sharing in self._sharing]
        scale_shapes = []
        if self.dtype in LARGEST:
            scale_shapes = [_shape_for([_scale_shape(packed[layer]) for layer in sharing]) for sharing in self._sharing]
        own = {index: layer for index, layer in enumerate(self.layers) if layer.shares_with is None}
        bounded = {index: layer for index, layer in own.items() if layer.bounds_dtype is not None}
        wanted = [(shape, self.dtype) for shape in shapes] + [(shape, SCALE_DTYPE) for shape in scale_shapes]
        wanted += [
            ((self.num_blocks, 2, layer.num_kv_heads, layer.head_dim), layer.bounds_dtype or self.dtype)
            for layer in bounded.values()
        ]
        made = [self._make(index, *each) for index, each in enumerate(wanted)]
        cut = len(shapes) + len(scale_shapes)
        return made[: len(shapes)], made[len(shapes) : cut], dict(zip(bounded, made[cut:], strict=True))

    def _make(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.tensor(index, shape, dtype)
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:  # torch tells of memory by RuntimeError
            raise KvscopeError(
                f"no memory for the KV cache: {self.num_blocks} blocks of {self.block_bytes / MIB:.2f} MiB are"
                f" {self.num_bytes / MIB:.0f} MiB on {self.device} ({str(error).splitlines()[0]:.120});"
                " give a smaller --kv-memory or --num-gpu-blocks-override"
            ) from error


def storage_dtype(kv_cache_dtype: str, activations: torch.dtype) -> torch.dtype:
    """What blocks are stored in, by the configuration's name for it; `auto` is the type of the activations."""
    return QUANTIZED_DTYPES.get(kv_cache_dtype, activations)


def block_bytes(
    layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, groups: Sequence[Sequence[int]] | None = None
) -> int:
    """Bytes of one block over all tensors: keys and values, their scales where `dtype` is quantized, and bounds."""
    each = [sum(tensor_block_bytes([layer], block_size, dtype)) for layer in layers]
    return sum(max(each[layer] for layer in sharing) for sharing in layers_by_tensor(layers, groups))


def layers_by_tensor(layers: Sequence[LayerShape], groups: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """The layers that lie in each tensor of a storage: one of each KV group that has so many."""
    if groups is None:
        return [[number] for number, layer in enumerate(layers) if layer.shares_with is None]
    return [[own[place] for own in groups if place < len(own)] for place in range(max(map(len, groups)))]


def tensor_block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of one block in each tensor of a storage: the data of each layer that has its own, then, if quantized, its
    scales, then the bounds of layers that have them."""
    layers = [layer for layer in layers if layer.shares_with is None]
    heads = [layer.vectors * block_size * layer.num_kv_heads for layer in layers]
    data = [count * layer.head_dim * dtype.itemsize for count, layer in zip(heads, layers, strict=True)]
    two_scales = [2 * block_size * layer.num_kv_heads * SCALE_DTYPE.itemsize for layer in layers]
    scales = two_scales if dtype in LARGEST else []
    bounds = [
        2 * each.num_kv_heads * each.head_dim * each.bounds_dtype.itemsize
        for each in layers
        if each.bounds_dtype is not None
    ]
    return (*data, *scales, *bounds)


def is_hnd(device: torch.device) -> bool:
    return device.type == "cuda"


def _packed_shape(num_blocks: int, block_size: int, layer: LayerShape, hnd: bool) -> tuple[int, ...]:
    if hnd:
        return (num_blocks, layer.vectors, layer.num_kv_heads, block_size, layer.head_dim)
    return (num_blocks, layer.vectors, block_size, layer.num_kv_heads, layer.head_dim)


def _scale_shape(packed: tuple[int, ...]) -> tuple[int, ...]:
    """Two for each token and head, also where one vector is key and value."""
    return (packed[0], 2, *packed[2:-1])


def _shape_for(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Of a tensor whose rows have room for each of `shapes`."""
    if len(set(shapes)) == 1:
        return shapes[0]
    return shapes[0][0], max(math.prod(shape[1:]) for shape in shapes)


def _first_of_rows(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A layer's part of each row."""
    return tensor if tensor.shape == shape else tensor[:, : math.prod(shape[1:])].view(shape)


def _logical_views(packed: torch.Tensor, hnd: bool) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = packed.unbind(1)
    return (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)
