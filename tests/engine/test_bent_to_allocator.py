"""`--allocator contiguous` alone: what was left to the engine bends, what was asked for is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine import Engine

Make = Callable[..., "Engine"]


def test_what_was_left_to_the_engine_bends_and_is_told(make_engine: Make) -> None:
    engine = make_engine(allocator="contiguous", enable_prefix_caching=None, num_gpu_blocks_override=3)
    hello = engine.snapshot().hello
    assert not hello.cache.prefix_caching
    assert hello.model.max_model_len == 2 * hello.cache.block_size, "3 blocks are a run of 2 and one of 1"
    off, shorter = engine.notes
    assert off.startswith("prefix caching is off: allocator='contiguous'")
    assert shorter.startswith(f"max_model_len is {hello.model.max_model_len} and not the model's ")


def test_what_fits_stays_as_the_model_has_it(make_engine: Make) -> None:
    engine = make_engine(allocator="buddy", enable_prefix_caching=False, num_gpu_blocks_override=3)
    assert engine.notes == ()


def test_what_was_asked_for_is_refused(make_engine: Make) -> None:
    with pytest.raises(BadInput, match="leave out --enable-prefix-caching"):
        EngineConfig(allocator="contiguous", enable_prefix_caching=True)
    with pytest.raises(BadInput, match="max_model_len=128 is not accepted with allocator='contiguous'"):
        make_engine(allocator="contiguous", max_model_len=128, num_gpu_blocks_override=3)
