"""Packed weights share large buffers without overlap, and buffers are freed with their last weight."""

import gc
import weakref

import pytest
import torch

from kvscope_kernels.cpu import weight_buffer
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.linear import Int8Weight
from kvscope_kernels.cpu.weight_buffer import WeightBuffer
from kvscope_kernels.quantized_linear.grouped_weight import rounded


def test_tensors_allocated_in_a_weight_buffer_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buffer, "CHUNK_BYTES", 1000)
    buffer = WeightBuffer()
    shapes = [((3, 5), torch.uint8), ((7,), torch.float32), ((250,), torch.float32), ((2, 600), torch.uint8)]
    taken = [buffer.allocate(shape, dtype) for shape, dtype in shapes]  # the last two need their own pieces
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    for number, (tensor, (shape, dtype)) in enumerate(zip(taken, shapes, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert bool((tensor == number).all())
        assert tensor.data_ptr() % 64 == taken[0].data_ptr() % 64
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken}) == 3
    assert buffer.allocate((0, 4), torch.float32).shape == (0, 4)


def test_weight_buffer_memory_is_kept_alive_by_its_tensors_only() -> None:
    buffer = WeightBuffer()
    first, second = (buffer.allocate((8,), torch.uint8) for _ in range(2))
    piece = weakref.ref(buffer._chunk)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del buffer
    gc.collect()
    assert piece() is None  # only the tensors keep its memory
    second.fill_(1)


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_weight_in_a_buffer_gives_the_same_product() -> None:
    buffer, generator = WeightBuffer(), torch.Generator().manual_seed(0)
    weights = [torch.randn(100, 70, generator=generator) for _ in range(3)]
    x = torch.randn(5, 70, generator=generator)
    together = [(Int8Weight(weight, buffer=buffer), NativeGrouped(rounded(weight), None, buffer)) for weight in weights]
    for (packed, in_groups), weight in zip(together, weights, strict=True):
        assert torch.equal(packed.product(x), Int8Weight(weight).product(x))
        assert torch.equal(in_groups.product(x), NativeGrouped(rounded(weight)).product(x))
    piece = buffer._chunk.untyped_storage().data_ptr()
    assert all(
        part.untyped_storage().data_ptr() == piece for pair in together for kept in pair for part in kept.tensors
    )
