"""Fixtures of comparison tests: a memory of 32 slots in 8 blocks of 4, which can be calculated by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope_engine.simulator.what_if.candidates import PAGED_BLOCK_SIZES
from kvscope_engine.simulator.what_if.comparison import PolicyComparison
from kvscope_telemetry.messages.what_if import Memory, PolicyUse, Running, WhatIfAnswer

MIB = 1 << 20


@pytest.fixture
def make_memory() -> Callable[..., Memory]:
    """Function that makes a memory of 8 blocks of 4 slots, with pages of 8 tokens of a layer:
    `make_memory(**changes)`.
    """

    def make(**changes: int | str) -> Memory:
        whole = {"num_blocks": 8, "block_size": 4, "block_bytes": 2 * MIB, "num_layers": 2, "max_model_len": 16}
        return Memory(**(whole | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_comparison(make_memory: Callable[..., Memory]) -> Callable[..., PolicyComparison]:
    """Function that makes a comparison of policies over such a memory: `make_comparison(**changes)`."""
    return lambda **changes: PolicyComparison(make_memory(**changes))


@pytest.fixture
def running() -> Callable[..., list[Running]]:
    """Function that makes requests of (number, tokens, limit[, prompt]): `running(*rows)`."""
    return lambda *rows: [Running(*row) for row in rows]


@pytest.fixture
def policy_use() -> Callable[[WhatIfAnswer, str], PolicyUse]:
    """Function that finds the use of a policy in an answer: `policy_use(answer, "paged 16")`."""

    def find(answer: WhatIfAnswer, name: str) -> PolicyUse:
        allocator, _, size = name.partition(" ")
        (found,) = (
            use for use in answer.policies if use.allocator == allocator and (not size or use.block_size == int(size))
        )
        return found

    return find


@pytest.fixture
def paged_sizes() -> tuple[int, ...]:
    """The block sizes that are always compared."""
    return PAGED_BLOCK_SIZES
