"""The use of slots under load, calculated by hand for each policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvscope_engine.simulator.memory_use import MemoryShares
from kvscope_engine.simulator.simulation import Simulation
from kvscope_engine.simulator.simulation_report import make_report

Make = Callable[..., Simulation]


def parts(shares: MemoryShares | None) -> tuple[float, ...]:
    """Return the parts in slots, of 16."""
    assert shares is not None
    found = (shares.states, shares.reserved, shares.internal, shares.external_and_others, shares.cached)
    assert sum(found) == pytest.approx(1)
    return tuple(16 * part for part in found)


def test_paged_memory_use_equals_the_one_calculated_by_hand(make_simulation: Make) -> None:
    """One request at a time runs in 4 blocks of 4; while the second waits the first has 6, then 7 tokens in 2
    blocks.
    """
    simulation = make_simulation([(0, 6, 2), (0, 6, 1)], num_blocks=4, max_num_seqs=1, enable_prefix_caching=False)
    simulation.run()
    found = make_report(simulation)
    assert parts(found.memory) == pytest.approx((6.5, 0, 1.5, 8, 0))
    assert (found.num_steps, found.num_steps_under_load, found.mean_batch_under_load) == (3, 2, 1.0)


def test_cached_blocks_are_counted_under_load(make_simulation: Make) -> None:
    """The first request leaves one full block cached while the second runs and the third waits."""
    simulation = make_simulation([(0, 6, 1), (0, 6, 1), (0, 6, 1)], num_blocks=4, max_num_seqs=1)
    simulation.run()
    assert parts(make_report(simulation).memory) == pytest.approx((6, 0, 2, 6, 2))  # 8 free, none cached; then 4 and 4


@pytest.mark.parametrize(
    ("allocator", "expected"),
    [
        # Two of three run, each in 2 blocks for the 8 tokens it may have: it has 3, then 4, will have 5.
        ("contiguous", (7, 3, 6, 0, 0)),
        # 5 tokens are reserved, the other 3 of 2 blocks are the allocator's.
        ("oracle", (7, 3, 0, 6, 0)),
        # 3 of prompt and 2 of output, a power of two already.
        ("buddy", (7, 3, 0, 6, 0)),
    ],
)
def test_reserving_allocators_use_memory_as_calculated_by_hand(
    make_simulation: Make, allocator: str, expected: tuple[float, ...]
) -> None:
    simulation = make_simulation([(0, 3, 2)] * 3, allocator, num_blocks=4, max_model_len=8)
    simulation.run()
    found = make_report(simulation)
    assert parts(found.memory) == pytest.approx(expected)
    assert (found.mean_batch_under_load, found.num_steps) == (2.0, 4)
