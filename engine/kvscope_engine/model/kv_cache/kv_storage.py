"""Stores the block pool on the device: one packed tensor per layer, and a tensor of scales if the cache is quantized.

Layers that choose among their blocks (sparse attention) also have bounds of their keys, one row per block. Layers of
different KV groups share tensors: a tensor has one layer of each group, since a block belongs to one group at a time.

Owns the layout: NHD `[blocks, 2, block_size, heads, dim]` on a CPU and HND `[blocks, 2, heads, block_size, dim]` on a
GPU, with 1 instead of 2 for latents. Must not depend on requests or policy. Other modules see the logical views
`(num_blocks, block_size, heads, dim)` and, of scales, `(num_blocks, block_size, heads)`. Code that copies whole blocks
uses `block_tensors`, so that data, scales and bounds are copied together.
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
"""Data type of scales, 4 bytes per vector of 64 or 128 elements.

float16 would save 2 bytes, but would lose vectors whose largest element is below 4e-6 and be imprecise below 8e-3 (its
subnormals). Every scale of a bfloat16 activation is representable in float32.
"""


@dataclass(frozen=True, slots=True)
class TokenPart:
    """One of the tensors that a layer stores per token in a model that runs its own forward code (`own_forward`)."""

    name: str
    """`key`, `value`, or `index` (the key of an indexer, which selects the tokens that attention reads)."""
    shape: tuple[int, ...]
    """Shape for one token: (heads, elements) or (elements,)."""
    dtype: torch.dtype

    def num_elements(self, stored: torch.dtype) -> int:
        """Return the number of elements of dtype `stored` that the tensor's bytes take.

        Raises BadInput if that is not a whole number.
        """
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes % stored.itemsize:
            raise BadInput(f"its {self.name}s of {num_bytes} bytes a token are not kept in {stored}")
        return num_bytes // stored.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and head dimension of one layer. If keys and values have different dimensions, both are stored
    with the larger one.
    """

    num_kv_heads: int
    head_dim: int
    bounds_dtype: torch.dtype | None = None
    """Dtype of the smallest and largest key per block, which is the dtype of activations; None if they are not stored.
    """
    latent_dim: int = 0
    """Number of a token's `head_dim` elements that are its latent, for a layer with latents (MLA); 0 for other layers.

    The remaining elements are a rotary key; there are no separate values.
    """
    shares_with: int | None = None
    """Index of the layer whose keys and values this layer reads; None if it stores its own."""
    parts: tuple[TokenPart, ...] = ()
    """Tensors that make up a token's `head_dim` elements, concatenated, if the model runs its own forward code;
    otherwise empty.
    """

    @property
    def vectors(self) -> int:
        """Number of vectors stored per token and head: 2 for key and value, 1 for latents or `parts`."""
        return 1 if self.latent_dim or self.parts else 2

    @property
    def num_elements(self) -> int:
        """Number of stored elements per token."""
        return self.vectors * self.num_kv_heads * self.head_dim

    @property
    def num_multiplied(self) -> int:
        """Number of key and value elements that attention multiplies, per query head and token."""
        widths = [part.shape[-1] for part in self.parts if part.name != "index"] or [self.head_dim]
        return sum(widths) + (self.latent_dim or (0 if self.parts else self.head_dim))

    def index_bytes(self, stored: torch.dtype) -> int:
        """Return the bytes per token that an indexer stores, in a storage of dtype `stored`."""
        return sum(part.num_elements(stored) * stored.itemsize for part in self.parts if part.name == "index")


class LayerKV(NamedTuple):
    """Keys and values of a layer, each (num_blocks, block_size, heads, dim), and their scales (num_blocks, block_size,
    heads) or None.

    For a layer with latents, `k` is all stored data and `v` a view of the latents at its start; `v_scale` belongs to
    the latents, `k_scale` to the rotary keys after them.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    bounds: torch.Tensor | None = None
    """Smallest and largest key of each block, (num_blocks, 2, heads, dim); None if they are not stored."""
    group: int = 0
    """Index of the KV group whose block tables address this layer."""
    is_shared: bool = False
    """Whether another layer writes these keys and values, earlier in each step."""


class KVStorage:
    """Keys and values of every block and layer. With `memory` (virtual memory), only mapped blocks are backed by
    memory.

    `groups` lists, per KV group, the layers that store their own KV; None for a single group of all layers. Layers at
    the same index in their groups share a tensor, whose rows are as long as the largest of these layers needs.

    Raises KvscopeError with the sizes if the device lacks memory.
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
        self._position = {layer: index for index, sharing in enumerate(self._sharing) for layer in sharing}
        self._group = {layer: group for group, group_layers in enumerate(groups or ()) for layer in group_layers}
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
        """Maximum bytes of all blocks together."""
        return self.num_blocks * self.block_bytes if self._memory is None else self._memory.num_bytes

    def resident_bytes(self) -> int:
        """Return the bytes of `memory` that currently back blocks; -1 if the storage was created without `memory`."""
        return -1 if self._memory is None else self._memory.resident_bytes()

    @property
    def block_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that blocks consist of. Row b of each is contiguous and belongs to block b.

        Copying row b of all of them copies block b including scales and bounds. CPU indexing supports their dtypes.
        """
        return (*map(as_bytes, self._packed), *self._scales, *self._bounds.values())

    @property
    def rows(self) -> RowTensors:
        """`block_tensors` in the form that copies inside the pool use."""
        assert self._rows is not None, "the storage is closed, or holds no layers"
        return self._rows

    @property
    def bounds_tokens(self) -> float:
        """Bytes of a block's bounds, expressed as a number of tokens whose keys and values take as much; 0 without
        bounds.
        """
        for layer in self.layers:
            if layer.bounds_dtype is not None:
                *token, bounds = tensor_block_bytes([layer], 1, self.dtype)
                return bounds / sum(token)
        return 0.0

    def layer(self, layer: int) -> LayerKV:
        return self._views[layer]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, each (num_blocks, block_size, heads, dim)."""
        return self._views[layer][:2]

    def k(self, layer: int) -> torch.Tensor:
        """Return the keys of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer].k

    def v(self, layer: int) -> torch.Tensor:
        """Return the values of a layer, (num_blocks, block_size, heads, dim)."""
        return self._views[layer].v

    def rows_of_tokens(self, layer: int) -> torch.Tensor:
        """Return the stored rows of a layer with `parts`, (num_blocks, block_size, elements)."""
        assert self.layers[layer].parts, "other layers have a row for each head"
        return self._views[layer].k.squeeze(2)

    def close(self) -> None:
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
        hnd, index, layer_shape = is_hnd(self.device), self._position[layer], self.layers[layer]
        shape = _packed_shape(self.num_blocks, self.block_size, layer_shape, hnd)
        packed, group = _first_of_rows(self._packed[index], shape), self._group.get(layer, 0)
        k_scale = v_scale = None
        if self._scales:
            k_scale, v_scale = _logical_views(_first_of_rows(self._scales[index], _scale_shape(shape)), hnd)
        if layer_shape.latent_dim or layer_shape.parts:
            stored = packed.squeeze(1)
            stored = stored.transpose(1, 2) if hnd else stored
            return LayerKV(stored, stored[..., : layer_shape.latent_dim], k_scale, v_scale, group=group)
        k, v = _logical_views(packed, hnd)
        return LayerKV(k, v, k_scale, v_scale, self._bounds.get(layer), group)

    def _allocate(self) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor]]:
        """Return data and, if quantized, scales per shared tensor, and bounds by layer if the layer has them.

        The memory is not initialized, so that a CPU allocates pages only as blocks are used. Free slots are never read.
        """
        hnd = is_hnd(self.device)
        packed = [_packed_shape(self.num_blocks, self.block_size, layer, hnd) for layer in self.layers]
        shapes = [_shape_for([packed[layer] for layer in sharing]) for sharing in self._sharing]
        scale_shapes = []
        if self.dtype in LARGEST:
            scale_shapes = [_shape_for([_scale_shape(packed[layer]) for layer in sharing]) for sharing in self._sharing]
        own = {index: layer for index, layer in enumerate(self.layers) if layer.shares_with is None}
        bounded = {index: layer for index, layer in own.items() if layer.bounds_dtype is not None}
        requests = [(shape, self.dtype) for shape in shapes] + [(shape, SCALE_DTYPE) for shape in scale_shapes]
        requests += [
            ((self.num_blocks, 2, layer.num_kv_heads, layer.head_dim), layer.bounds_dtype or self.dtype)
            for layer in bounded.values()
        ]
        tensors = [self._empty(index, *each) for index, each in enumerate(requests)]
        num_tensors = len(shapes) + len(scale_shapes)
        return (
            tensors[: len(shapes)],
            tensors[len(shapes) : num_tensors],
            dict(zip(bounded, tensors[num_tensors:], strict=True)),
        )

    def _empty(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.tensor(index, shape, dtype)
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:  # torch reports a lack of memory as RuntimeError
            raise KvscopeError(
                f"no memory for the KV cache: {self.num_blocks} blocks of {self.block_bytes / MIB:.2f} MiB are"
                f" {self.num_bytes / MIB:.0f} MiB on {self.device} ({str(error).splitlines()[0]:.120});"
                " give a smaller --kv-memory or --num-gpu-blocks-override"
            ) from error


def storage_dtype(kv_cache_dtype: str, activations: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are stored; `auto` means that of the activations."""
    return QUANTIZED_DTYPES.get(kv_cache_dtype, activations)


def block_bytes(
    layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, groups: Sequence[Sequence[int]] | None = None
) -> int:
    """Return the bytes of one block over all tensors: keys and values, scales if `dtype` is quantized, and bounds."""
    layer_bytes = [sum(tensor_block_bytes([layer], block_size, dtype)) for layer in layers]
    return sum(max(layer_bytes[layer] for layer in sharing) for sharing in layers_by_tensor(layers, groups))


def layers_by_tensor(layers: Sequence[LayerShape], groups: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Return the layers that share each tensor: one of each KV group that has enough layers."""
    if groups is None:
        return [[number] for number, layer in enumerate(layers) if layer.shares_with is None]
    return [[group[index] for group in groups if index < len(group)] for index in range(max(map(len, groups)))]


def tensor_block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the bytes of one block per tensor: data of each layer with its own KV, then scales if quantized, then
    bounds.
    """
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
    """Return the shape of the scales: two per token and head, even if one vector is both key and value."""
    return (packed[0], 2, *packed[2:-1])


def _shape_for(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a shape whose rows are large enough for each of `shapes`."""
    if len(set(shapes)) == 1:
        return shapes[0]
    return shapes[0][0], max(math.prod(shape[1:]) for shape in shapes)


def _first_of_rows(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of `shape` over the first elements of each row, for a tensor shared by layers of other shapes."""
    return tensor if tensor.shape == shape else tensor[:, : math.prod(shape[1:])].view(shape)


def _logical_views(packed: torch.Tensor, hnd: bool) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = packed.unbind(1)
    return (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)
