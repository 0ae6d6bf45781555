"""Copy speed follows the latest measurements, weighted by their size."""

from __future__ import annotations

import pytest

from kvscope_engine.model.kv_cache.kv_offload.copy_speed import HALF_LIFE_BLOCKS, CopySpeed


def test_block_copy_speed_is_the_mean_seconds_per_block() -> None:
    pace = CopySpeed()
    assert pace.seconds_per_block == 0
    pace.record_copy(10, 1.0)
    assert pace.seconds_per_block == pytest.approx(0.1)
    pace.record_copy(0, 0.0)
    assert pace.seconds_per_block == pytest.approx(0.1)


def test_block_copy_speed_weights_recent_and_large_copies_most() -> None:
    pace = CopySpeed()
    pace.record_copy(1000, 1.0)
    pace.record_copy(1, 1.0)
    assert pace.seconds_per_block < 0.003
    pace.record_copy(HALF_LIFE_BLOCKS * 10, HALF_LIFE_BLOCKS * 10 * 0.5)
    assert pace.seconds_per_block == pytest.approx(0.5, rel=0.01)


def test_resetting_block_copy_totals_keeps_the_measured_speed() -> None:
    pace = CopySpeed()
    pace.record_copy(4, 2.0)
    pace.reset_totals()
    assert (pace.num_blocks, pace.seconds, pace.seconds_per_block) == (0, 0, 0.5)
    pace.reset()
    assert pace.seconds_per_block == 0
