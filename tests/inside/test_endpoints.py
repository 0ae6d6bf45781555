"""Where an engine that is watched from inside tells, and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope_inside.endpoints import endpoint_of_rank, file_of_rank, free_file


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("ipc:///tmp/v", 0, "ipc:///tmp/v"),
        ("ipc:///tmp/v", 2, "ipc:///tmp/v-2"),
        ("tcp://0.0.0.0:7000", 0, "tcp://0.0.0.0:7000"),
        ("tcp://0.0.0.0:7000", 3, "tcp://0.0.0.0:7006"),
    ],
)
def test_each_rank_tells_at_a_place_of_its_own(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


def test_a_recording_never_stands_in_the_way_of_the_next_start(tmp_path: Path) -> None:
    wanted = tmp_path / "run.mcap"
    assert free_file(wanted) == wanted
    (tmp_path / "run.mcap.part").touch()  # it was killed
    assert free_file(wanted) == tmp_path / "run.2.mcap"
    (tmp_path / "run.2.mcap").touch()
    assert free_file(wanted) == tmp_path / "run.3.mcap"
    assert file_of_rank(wanted, 1) == tmp_path / "run-1.mcap"
