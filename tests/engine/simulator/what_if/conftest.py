"""A memory of 32 slots in 8 blocks of 4, in which everything can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope_engine.simulator.what_if.candidates import PAGED_BLOCK_SIZES
from kvscope_engine.simulator.what_if.comparison import PolicyComparison
from kvscope_telemetry.messages.what_if import Memory, PolicyUse, Running, WhatIfAnswer

MIB = 1 << 20


@pytest.fixture
def make_memory() -> Callable[..., Memory]:
    """8 blocks of 4 slots and 2 MiB over two layers (so a page holds 8 tokens of a layer); at most 16 tokens each."""

    def make(**changes: int | str) -> Memory:
        whole = {"num_blocks": 8, "block_size": 4, "block_bytes": 2 * MIB, "num_layers": 2, "max_model_len": 16}
        return Memory(**(whole | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_comparison(make_memory: Callable[..., Memory]) -> Callable[..., PolicyComparison]:
    """Policies over such a memory."""
    return lambda **changes: PolicyComparison(make_memory(**changes))


@pytest.fixture
def running() -> Callable[..., list[Running]]:
    """Requests as (number, tokens, limit[, prompt])."""
    return lambda *rows: [Running(*row) for row in rows]


@pytest.fixture
def policy_use() -> Callable[[WhatIfAnswer, str], PolicyUse]:
    """What an answer says of `contiguous`, `buddy`, `virtual` or `paged 16`."""

    def find(answer: WhatIfAnswer, name: str) -> PolicyUse:
        allocator, _, size = name.partition(" ")
        (found,) = (
            use for use in answer.policies if use.allocator == allocator and (not size or use.block_size == int(size))
        )
        return found

    return find


@pytest.fixture
def paged_sizes() -> tuple[int, ...]:
    """Those that are always compared."""
    return PAGED_BLOCK_SIZES
