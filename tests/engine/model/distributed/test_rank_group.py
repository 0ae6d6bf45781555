"""A group of ranks over gloo, each on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine.model.distributed.rank import Rank
from kvscope_engine.model.distributed.rank_group import RankGroup

COUNT = 3
CPU = torch.device("cpu")
InAll = Callable[[Callable[[int, RankGroup], Any]], list[Any]]


@pytest.fixture
def run_on_all_ranks(tmp_path: Path) -> InAll:
    """Function that runs a callable on every rank concurrently and returns the results."""

    def run(act: Callable[[int, RankGroup], Any]) -> list[Any]:
        def of_rank(index: int) -> Any:
            group = RankGroup(tmp_path, Rank(index, COUNT), CPU)
            try:
                return act(index, group)
            finally:
                group.close()

        with ThreadPoolExecutor(COUNT) as threads:
            return list(threads.map(of_rank, range(COUNT)))

    return run


def test_all_ranks_get_the_same_reduced_and_broadcast_values_and_agreement(run_on_all_ranks: InAll) -> None:
    def act(index: int, group: RankGroup) -> Any:
        added = group.all_reduce(torch.full((2,), float(index + 1))).tolist()
        shared = group.broadcast(torch.full((2,), index + 5)).tolist()
        return added, shared, group.all_agree(True), group.all_agree(index != 1), group.num_points

    assert run_on_all_ranks(act) == [([6.0, 6.0], [5, 5], True, False, 4)] * COUNT


def test_sums_during_graph_capture_are_local_unless_recorded(
    run_on_all_ranks: InAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails between two sums during a capture leaves no rank waiting, and its tries do not count. Recorded
    sums work as always.
    """
    capturing = threading.local()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(capturing, "is_on", False))

    def act(index: int, group: RankGroup) -> Any:
        with group.recording():
            outside = group.all_reduce(torch.ones(1)).item() if index else 1.0
            capturing.is_on = True
            inside = group.all_reduce(torch.ones(1)).item()
        capturing.is_on = False
        points = group.num_points
        return outside, inside, points, group.all_agree(True), group.num_points

    assert run_on_all_ranks(act) == [(1.0, float(COUNT), 0, True, 1)] * COUNT
