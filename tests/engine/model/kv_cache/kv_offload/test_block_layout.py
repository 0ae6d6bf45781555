"""Blocks across tensors of any dtype and shape, as the widest words that fit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvscope_engine.model.kv_cache.kv_offload.block_layout import BlockLayout, layout_text
from kvscope_engine.model.kv_cache.kv_storage import KVStorage


@dataclass
class Tensors:
    block_tensors: tuple[torch.Tensor, ...]


def test_a_storage_is_its_tensors_one_behind_the_other(storage: KVStorage) -> None:
    words = BlockLayout(storage)
    assert (words.num_blocks, words.block_bytes, words.dtype) == (12, storage.block_bytes, torch.int64)
    assert [part.columns for part in words.parts] == [slice(0, 64), slice(64, 160)]
    assert words.parts[1].blocks.data_ptr() == storage.block_tensors[1].data_ptr()


@pytest.mark.parametrize(
    ("shapes", "word"),
    [
        (((4, 2), (8,)), torch.int64),
        (((4, 2), (3, 4)), torch.int32),
        (((4, 2), (6,)), torch.int16),
        (((1,), (8,)), torch.uint8),
    ],
)
def test_the_smallest_part_decides_the_words(shapes: tuple[tuple[int, ...], ...], word: torch.dtype) -> None:
    words = BlockLayout(Tensors(tuple(torch.zeros(5, *shape, dtype=torch.int8) for shape in shapes)))
    assert words.dtype == word
    assert words.slots(torch.zeros(2, words.block_bytes, dtype=torch.uint8)).shape == (2, words.parts[-1].columns.stop)


def test_layouts_differ_by_dtype_and_shape() -> None:
    texts = {
        layout_text(Tensors((torch.zeros(5, *shape, dtype=dtype),)))
        for shape in ((4, 2), (2, 4))
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert len(texts) == 4
    assert layout_text(Tensors((torch.zeros(5, 2),))) == layout_text(Tensors((torch.zeros(9, 2),)))
