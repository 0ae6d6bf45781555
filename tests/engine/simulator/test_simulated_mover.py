"""The waiting time for simulated copies, by hand: blocks of 16 MiB, a block a second on the link and the slow disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvscope_engine.simulator.costs.cost_model import CostModel
from kvscope_engine.simulator.simulated_mover import SimulatedMover
from kvscope_telemetry.ledger import Tier

BLOCK_BYTES = 16 << 20  # so four of them are in the staging buffers, and 16 in the queue
SECOND_NS = 1_000_000_000


@pytest.fixture
def mover(one_second_step: CostModel) -> SimulatedMover:
    cost = replace(
        one_second_step,
        host_bandwidth=BLOCK_BYTES,
        disk_bandwidth=2 * BLOCK_BYTES,
        disk_write_bandwidth=BLOCK_BYTES,
    )
    return SimulatedMover(cost, BLOCK_BYTES, has_disk=True)


def now_s(mover: SimulatedMover) -> float:
    return mover.now_ns / SECOND_NS


def test_saves_overlap_the_step_while_they_fit_the_staging_buffers(mover: SimulatedMover) -> None:
    mover.start_step(0)
    mover.save(range(4), range(4))
    mover.flush()
    assert now_s(mover) == 0
    mover.start_step(1 * SECOND_NS)  # three are left
    mover.save(range(3), range(3))
    mover.flush()
    assert now_s(mover) == 3
    mover.start_step(30 * SECOND_NS)
    mover.save(range(6), range(6))
    mover.flush()
    assert now_s(mover) == 32
    assert mover.moved.saved_blocks == 13
    assert mover.moved.save_ns == 4 * SECOND_NS


def test_simulated_loads_wait_for_pending_copies(mover: SimulatedMover) -> None:
    mover.start_step(0)
    mover.save([0, 1], [0, 1])
    mover.load([5, 6, 7], [2, 3, 4])
    assert now_s(mover) == 0  # nothing is copied before the flush
    mover.flush()
    assert now_s(mover) == 5
    mover.flush()
    assert now_s(mover) == 5
    assert (mover.moved.loaded_blocks, mover.moved.load_ns, mover.moved.save_ns) == (3, 5 * SECOND_NS, 0)


def test_step_waits_for_disk_reads_and_for_writes_only_when_the_queue_is_full(mover: SimulatedMover) -> None:
    mover.start_step(0)
    assert mover.num_offloadable == 16
    assert mover.offload(range(16), range(16), [None] * 16) == [True] * 16
    assert now_s(mover) == 0
    assert mover.num_offloadable == 0
    assert mover.offload([16], [16], [None]) == [True]
    assert now_s(mover) == 1
    assert mover.load_from_disk([0, 1, 2], [9, 8, 7]) == [True] * 3
    assert now_s(mover) == 2.5
    moved = mover.moved
    assert (moved.offloaded_blocks, moved.offload_ns, moved.loaded_disk_blocks, moved.load_from_disk_ns) == (
        17,
        SECOND_NS,
        3,
        1.5 * SECOND_NS,
    )


def test_simulated_load_remembers_the_source_tier_of_a_block_until_the_next_step(mover: SimulatedMover) -> None:
    mover.start_step(0)
    mover.load_from_disk([3], [9])
    mover.load([8, 9], [1, 2])
    mover.load([9], [4])  # the place on the way up holds something else by now
    assert mover.origins == {1: Tier.HOST, 2: Tier.DISK, 4: Tier.HOST}
    mover.start_step(0)
    assert mover.origins == {}


def test_copy_times_are_those_of_the_link_and_the_disk(mover: SimulatedMover) -> None:
    assert mover.swap_seconds(3) == 6
    assert mover.load_seconds(3, 2) == 4
    assert (mover.recovered(), mover.failure, mover.has_disk) == ([], "", True)


def test_offloading_without_a_disk_is_an_error(one_second_step: CostModel) -> None:
    mover = SimulatedMover(one_second_step, BLOCK_BYTES, has_disk=False)
    assert not mover.has_disk
    with pytest.raises(AssertionError, match="no disk"):
        mover.offload([1], [0], [None])
