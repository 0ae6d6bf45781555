"""`--allocator contiguous` alone: defaults are adjusted, but explicit options that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine import Engine

Make = Callable[..., "Engine"]


def test_defaults_are_adjusted_to_the_allocator_and_reported(make_engine: Make) -> None:
    engine = make_engine(allocator="contiguous", enable_prefix_caching=None, num_gpu_blocks_override=3)
    hello = engine.snapshot().hello
    assert not hello.cache.prefix_caching
    assert hello.model.max_model_len == 2 * hello.cache.block_size, "3 blocks are a run of 2 and one of 1"
    off, shorter = engine.notes
    assert off.startswith("prefix caching is off: allocator='contiguous'")
    assert shorter.startswith(f"max_model_len is {hello.model.max_model_len} instead of the model's ")


def test_engine_options_that_fit_the_allocator_are_not_adjusted(make_engine: Make) -> None:
    engine = make_engine(allocator="buddy", enable_prefix_caching=False, num_gpu_blocks_override=3)
    assert engine.notes == ()


def test_explicit_options_that_do_not_fit_the_allocator_are_refused(make_engine: Make) -> None:
    with pytest.raises(BadInput, match="leave out --enable-prefix-caching"):
        EngineConfig(allocator="contiguous", enable_prefix_caching=True)
    with pytest.raises(BadInput, match="max_model_len=128 is not accepted with allocator='contiguous'"):
        make_engine(allocator="contiguous", max_model_len=128, num_gpu_blocks_override=3)
