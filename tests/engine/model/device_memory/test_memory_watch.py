"""Step limits while others use memory that was planned for steps: reduced immediately, raised after a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_engine.model.device_memory.memory_watch import (
    RAISE_AFTER_S,
    MemoryLevel,
    MemoryWatch,
    StepCosts,
    step_costs,
)

MIB = 1 << 20
COSTS = StepCosts(
    max_tokens=8192,
    min_tokens=256,
    activations=1024 * MIB,
    fixed=100 * MIB,
    graphs=300 * MIB,
    piecewise_graphs=200 * MIB,
)
FOR_OTHERS = 500 * MIB


@pytest.fixture
def watch() -> MemoryWatch:
    return MemoryWatch(COSTS, FOR_OTHERS)


def test_memory_shortage_first_reduces_step_tokens_then_drops_prefill_and_decode_graphs() -> None:
    assert [level.max_tokens for level in COSTS.levels] == [8192, 4096, 2048, 1024, 512, 256, 256, 256]
    assert COSTS.levels[-3:] == (MemoryLevel(256), MemoryLevel(256, False), MemoryLevel(256, False, False))
    needed = [COSTS.needed(level) // MIB for level in COSTS.levels]
    assert needed == [1624, 1112, 856, 728, 664, 632, 432, 132]


@pytest.mark.parametrize(
    ("taken", "level"),
    [
        (0, MemoryLevel(8192)),
        (1, MemoryLevel(4096)),
        (512, MemoryLevel(4096)),
        (513, MemoryLevel(2048)),
        (992, MemoryLevel(256)),
        (993, MemoryLevel(256, False)),
        (1193, MemoryLevel(256, False, False)),
        (9999, MemoryLevel(256, False, False)),
    ],
)
def test_step_limits_drop_as_far_as_memory_taken_by_others_requires(
    watch: MemoryWatch, taken: int, level: MemoryLevel
) -> None:
    """Values are MiB beyond the reserve for others. Decodes always stay possible."""
    assert watch.update(FOR_OTHERS + taken * MIB, 0.0) == bool(taken)
    assert watch.level == level
    assert watch.is_lowered == bool(taken)
    assert watch.missing(FOR_OTHERS + taken * MIB) == taken * MIB


def test_step_limits_do_not_change_while_others_stay_within_their_memory_reserve(watch: MemoryWatch) -> None:
    assert not any(watch.update(others * MIB, float(others)) for others in range(0, 501, 100))


def test_lowered_step_limits_rise_after_memory_was_free_for_a_while(watch: MemoryWatch) -> None:
    watch.update(FOR_OTHERS + 600 * MIB, 0.0)
    assert not watch.update(0, 10.0)
    assert not watch.update(0, 10.0 + RAISE_AFTER_S - 1)
    assert not watch.update(FOR_OTHERS + 600 * MIB, 10.0 + RAISE_AFTER_S - 0.5), "the memory was taken again"
    assert not watch.update(0, 50.0)
    assert watch.update(0, 50.0 + RAISE_AFTER_S)
    assert watch.level == MemoryLevel(8192)
    assert not watch.is_lowered


def test_lowered_step_limits_rise_as_far_as_free_memory_allows(watch: MemoryWatch) -> None:
    watch.update(FOR_OTHERS + 9999 * MIB, 0.0)
    watch.update(FOR_OTHERS + 600 * MIB, 1.0)
    assert watch.update(FOR_OTHERS + 600 * MIB, 1.0 + RAISE_AFTER_S)
    assert watch.level == MemoryLevel(2048)


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 20)), max_size=40))
def test_steps_never_need_more_than_the_available_memory(looks: list[tuple[int, int]]) -> None:
    watch, now_s = MemoryWatch(COSTS, FOR_OTHERS), 0.0
    for others, passed_s in looks:
        now_s += passed_s
        before = watch.level
        assert watch.update(others * MIB, now_s) == (watch.level != before)
        room = COSTS.needed(COSTS.levels[0]) - watch.missing(others * MIB)
        assert COSTS.needed(watch.level) <= room or watch.level == COSTS.levels[-1]


def test_step_limits_never_change_without_a_memory_plan() -> None:
    costs = step_costs(None, 512, 8, has_graphs=True)
    assert costs.levels == (MemoryLevel(512),)
    assert not MemoryWatch(costs, 0).update(1 << 40, 0.0)
