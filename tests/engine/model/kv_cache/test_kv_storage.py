"""The storage of the KV pool: layout, views, copies, and the error if memory is insufficient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape, _packed_shape, block_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_kernels.copy_rows import copy_rows_torch
from kvscope_kernels.kv_formats import dequantize
from kvscope_kernels.kv_write import kv_write_torch
from kvscope_telemetry.errors import KvscopeError

CPU = torch.device("cpu")
UNEQUAL = (LayerShape(2, 8), LayerShape(1, 24))


def test_kv_storage_layers_of_different_shapes_do_not_overlap() -> None:
    storage = KVStorage(5, 4, UNEQUAL, torch.float32, CPU)
    assert storage.k(0).shape == storage.v(0).shape == (5, 4, 2, 8)
    assert storage.k(1).shape == (5, 4, 1, 24)
    for layer in range(len(UNEQUAL)):
        for cache in storage.kv(layer):
            cache.zero_()
    storage.k(1)[3, 2] = 7.0
    assert storage.kv(1)[0][3, 2].eq(7.0).all()
    assert storage.v(1).eq(0.0).all()
    assert storage.k(0).eq(0.0).all()
    assert storage.k(0)[2].is_contiguous(), "a block's keys must be contiguous on a CPU"


def test_reported_bytes_are_the_allocated_bytes() -> None:
    storage = KVStorage(5, 4, UNEQUAL, torch.bfloat16, CPU)
    assert storage.block_bytes == block_bytes(UNEQUAL, 4, torch.bfloat16) == 2 * 4 * (2 * 8 + 24) * 2
    assert storage.num_bytes == sum(cache.nbytes for layer in range(len(UNEQUAL)) for cache in storage.kv(layer))
    storage.close()
    assert storage.block_tensors == ()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_blocks_include_their_scales(dtype: torch.dtype) -> None:
    storage = KVStorage(5, 4, UNEQUAL, dtype, CPU)
    assert storage.block_bytes == 2 * 4 * (2 * (8 + 4) + (24 + 4))
    assert storage.num_bytes == sum(tensor.nbytes for tensor in storage.block_tensors)
    keys = storage.layer(0)
    assert keys.k_scale is not None
    assert keys.v_scale is not None
    assert (keys.k.dtype, keys.k_scale.dtype, keys.k_scale.shape) == (dtype, torch.float32, (5, 4, 2))
    assert KVStorage(5, 4, UNEQUAL, torch.float32, CPU).layer(0).k_scale is None
    storage.close()
    assert not storage.block_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_copying_one_row_of_every_kv_tensor_copies_the_whole_block(dtype: torch.dtype) -> None:
    """Tiers rely on this: copying those rows copies the block."""
    storage, other = (KVStorage(6, 2, UNEQUAL, dtype, CPU) for _ in range(2))
    new = [torch.randn(2, shape.num_kv_heads, shape.head_dim) for shape in UNEQUAL]
    for layer, rows in enumerate(new):
        kv = storage.layer(layer)
        kv_write_torch(rows, -rows, kv.k, kv.v, torch.tensor([6, 7]), kv.k_scale, kv.v_scale)
    copy_rows_torch(storage.rows, torch.tensor([(3, 5)]))
    for mine, theirs in zip(storage.block_tensors, other.block_tensors, strict=True):
        assert len(mine) == 6
        assert mine[5].is_contiguous()
        theirs[1] = mine[5]
    for layer, rows in enumerate(new):
        kv = other.layer(layer)
        found = kv.v[1].float() if kv.v_scale is None else dequantize(kv.v[1], kv.v_scale[1], torch.float32)
        torch.testing.assert_close(found, -rows, rtol=0.1, atol=0.1)


def test_gpu_layout_has_heads_before_slots() -> None:
    assert _packed_shape(5, 4, LayerShape(2, 8), hnd=True) == (5, 2, 2, 4, 8)
    assert _packed_shape(5, 4, LayerShape(2, 8), hnd=False) == (5, 2, 4, 2, 8)


def test_copies_read_all_sources_before_writing() -> None:
    storage = KVStorage(6, 2, UNEQUAL, torch.float32, CPU)
    for layer in range(2):
        for part, sign in zip(storage.kv(layer), (1, -1), strict=True):
            part.copy_(sign * torch.arange(6.0).view(6, 1, 1, 1).expand_as(part))
    copy_rows_torch(storage.rows, torch.tensor([(1, 2), (2, 1), (5, 0)]))
    for layer in range(2):
        assert storage.k(layer)[:, 1, 0, 3].tolist() == [5, 2, 1, 3, 4, 5]
        assert storage.v(layer)[:, 0, 0, 0].tolist() == [-5, -2, -1, -3, -4, -5]


def test_insufficient_memory_is_reported_with_sizes() -> None:
    with pytest.raises(KvscopeError, match=r"1099511627776 blocks of .* MiB are .* MiB on cpu"):
        KVStorage(1 << 40, 16, (LayerShape(64, 256),), torch.float32, CPU)


def test_kv_storage_has_the_layer_shapes_and_dtype_of_the_model(tiny_loaded: Callable[..., LoadedModel]) -> None:
    storage = storage_for_model(tiny_loaded("qwen3"), 3, 8)
    assert storage.layers == (LayerShape(2, 16), LayerShape(2, 16))
    assert (storage.num_blocks, storage.block_size, storage.dtype) == (3, 8, torch.float32)
