"""Readers can tell whether a file is being written, whenever they check."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvscope_telemetry.recordings.regular_file import FollowedFile, hold_for_writing

fcntl = pytest.importorskip("fcntl")


def test_reader_that_checks_a_new_file_does_not_prevent_the_writer_from_locking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.mcap.part"
    with path.open("xb") as written, path.open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        hold_for_writing(written)
        assert FollowedFile(path).is_written()
    assert not FollowedFile(path).is_written()


def test_reader_that_never_unlocks_does_not_block_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.mcap.part"
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with path.open("xb") as written, path.open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        hold_for_writing(written)
    assert 0 < sum(waits) < 1.0
