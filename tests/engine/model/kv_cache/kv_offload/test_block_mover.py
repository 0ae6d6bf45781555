"""The block mover as the engine builds it, on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.model.kv_cache.kv_offload.block_copies import HostBlockCopier
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_telemetry.errors import EngineDead

MakeMover = Callable[..., BlockMover]
Contents = Callable[[Sequence[int]], list[bytes]]
Scramble = Callable[[Sequence[int]], None]


def test_blocks_come_back_from_host_memory(make_mover: MakeMover, contents: Contents, scramble: Scramble) -> None:
    mover, before = make_mover(8), contents([3, 1, 7])
    mover.save([3, 1, 7], [6, 0, 1])
    mover.flush()
    scramble([3, 1, 7])
    assert contents([3, 1, 7]) != before
    mover.load([6, 0, 1], [7, 3, 1])
    mover.flush()
    assert contents([7, 3, 1]) == before


def test_blocks_come_back_from_disk(make_mover: MakeMover, contents: Contents, scramble: Scramble) -> None:
    mover, before = make_mover(3, 5), contents([0, 1, 2])
    mover.save([0, 1, 2], [0, 1, 2])
    assert mover.offload([0, 1, 2], [4, 2, 3], [None] * 3) == [True] * 3
    scramble([0, 1, 2])
    mover.save([0, 1, 2], [0, 1, 2])
    assert mover.load_from_disk([4, 2, 3, 0], [2, 1, 0, 1]) == [True, True, True, False]
    mover.load([2, 0], [0, 2])
    assert contents([0, 2]) == [before[0], before[2]]


def test_mover_without_a_disk_offloads_nothing_to_it(make_mover: MakeMover) -> None:
    mover = make_mover(2)
    assert (mover.has_disk, mover.failure, mover.num_disk_slots) == (False, "", 0)
    assert mover.offload([0, 1], [0, 1], [None, None]) == [False, False]
    assert mover.load_from_disk([0], [0]) == [False]
    assert (mover.recovered(), mover.salt) == ([], None)


def test_copies_change_no_other_blocks(make_mover: MakeMover, contents: Contents) -> None:
    everything = contents(range(12))
    mover = make_mover(12)
    assert contents(range(12)) == everything, "the warm-up copies at the start changed blocks"
    mover.save([5], [5])
    mover.load([5], [6])
    everything[6] = everything[5]
    assert contents(range(12)) == everything


def test_swap_cost_is_measured_from_the_start(make_mover: MakeMover) -> None:
    mover = make_mover(8)
    assert 0 < mover.swap_seconds(1) < 1
    assert mover.swap_seconds(10) == pytest.approx(10 * mover.swap_seconds(1))
    before = mover.swap_seconds(1)
    mover.save(list(range(8)), list(range(8)))
    assert mover.swap_seconds(1) != before
    assert mover.swap_seconds(0) == 0


def test_moved_bytes_are_counted(make_mover: MakeMover, storage: KVStorage) -> None:
    mover = make_mover(4, 2)
    assert (mover.stats.saved_bytes, mover.stats.loaded_bytes) == (0, 0), "the warm-up copies at the start were counted"
    mover.save([0, 1, 2], [0, 1, 2])
    mover.load([0], [5])
    mover.offload([0, 1], [0, 1], [None, None])
    mover.load_from_disk([0, 1], [0, 1])
    stats = mover.stats
    size = storage.block_bytes
    assert (stats.saved_bytes, stats.loaded_bytes, stats.disk_read_bytes) == (3 * size, size, 2 * size)
    assert (stats.host_requested_bytes, stats.host_real_bytes, stats.torch_pinned_bytes) == (4 * size, 8192, 8192)
    assert (stats.num_lost, stats.host_is_pinned) == (0, False)


def test_closing_the_block_mover_ends_its_thread_and_closes_its_files(
    make_mover: MakeMover, own_cache: Path, open_fds: Callable[[], int], prefix: Callable[[int], Prefix]
) -> None:
    before, threads = open_fds(), threading.active_count()
    own_cache.mkdir()
    for keep in (False, True):
        mover = make_mover(4, 4, own_cache / "kv", keep=keep)
        assert (open_fds(), threading.active_count()) == (before + 1, threads + 1)
        mover.save([0, 1], [0, 1])
        mover.offload([0, 1], [0, 1], [prefix(0), None])
        assert mover.close() == ""
        assert (open_fds(), threading.active_count()) == (before, threads)
        assert mover.close() == ""


@pytest.mark.parametrize(
    "use",
    [
        lambda mover: mover.save([0], [0]),
        lambda mover: mover.load([0], [0]),
        lambda mover: mover.offload([0], [0], [None]),
        lambda mover: mover.load_from_disk([0], [0]),
        lambda mover: mover.flush(),
    ],
)
def test_closed_mover_refuses_every_call(make_mover: MakeMover, use: Callable[[Any], Any]) -> None:
    mover = make_mover(2, 2)
    mover.close()
    with pytest.raises(AssertionError, match="closed"):
        use(mover)


def test_failed_block_copy_stops_all_moves_and_discards_the_disk_file(
    make_mover: MakeMover, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prefix: Callable[[int], Prefix]
) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("an illegal instruction was encountered")

    path = tmp_path / "tier"
    mover = make_mover(4, 4, path, keep=True)
    mover.save([0], [0])
    assert mover.offload([0], [0], [prefix(0)]) == [True]
    assert (mover.is_persistent, mover.copy_failure) == (True, "")
    monkeypatch.setattr(HostBlockCopier, "save", fails)
    with pytest.raises(RuntimeError):
        mover.save([1], [1])
    monkeypatch.undo()
    assert "an illegal instruction was encountered" in mover.copy_failure
    assert not mover.is_persistent
    for move in (lambda: mover.save([1], [1]), lambda: mover.offload([0], [1], [None]), mover.flush):
        with pytest.raises(EngineDead, match="could not be copied between the tiers"):
            move()
    mover.close()
    assert make_mover(4, 4, path, keep=True).recovered() == []
