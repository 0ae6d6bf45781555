"""Which disk files are used, and which are left alone."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile, index_path, open_disk_file
from kvscope_telemetry.errors import BadInput

SIZE = 3 * 4096


def open_file(path: Path | None, *, keep: bool = True) -> OpenFile:
    return open_disk_file(path, SIZE, keep=keep)


def test_kept_file_is_exclusive_and_preallocated(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = open_file(path)
    status = path.stat()
    assert (status.st_size, status.st_mode & 0o777) == (SIZE, 0o600)
    assert status.st_blocks * 512 >= SIZE, "its blocks are not taken yet"
    with pytest.raises(BadInput, match=r"is in use by another engine|that kvscope did not write"):
        open_file(path)
    index_path(path).touch()
    with pytest.raises(BadInput, match=r"'.*kv' is in use by another engine"):
        open_file(path)
    os.close(file.fd)
    again = open_file(path)
    assert again.previous_bytes == SIZE
    os.close(again.fd)


def test_file_not_to_be_kept_is_unlinked_immediately(tmp_path: Path, own_cache: Path) -> None:
    for path in (tmp_path / "kv", None):
        file = open_file(path, keep=False)
        assert os.fstat(file.fd).st_nlink == 0
        assert file.is_at_path()
        os.close(file.fd)
    assert not (tmp_path / "kv").exists()
    assert list(own_cache.iterdir()) == []


def test_disk_tier_path_with_a_file_of_another_program_is_refused_and_unchanged(
    tmp_path: Path, open_fds: Callable[[], int]
) -> None:
    path, before = tmp_path / "thesis.txt", open_fds()
    path.write_text("years of work")
    for keep in (True, False):
        with pytest.raises(BadInput, match=r"has 13 bytes that kvscope did not write .* remove it or name another"):
            open_file(path, keep=keep)
    assert path.read_text() == "years of work"
    assert open_fds() == before


def test_only_regular_files_in_existing_folders_are_accepted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is not a regular file"):
        open_file(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"cannot make the KV cache's file .*: Is a directory"):
        open_file(tmp_path)
    with pytest.raises(BadInput, match=r"cannot make the KV cache's file at '.*nowhere/kv': No such file"):
        open_file(tmp_path / "nowhere" / "kv")


def test_disk_tier_notices_that_its_file_was_removed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = open_file(path)
    assert file.is_at_path()
    path.unlink()
    assert not file.is_at_path()
    path.touch()
    assert not file.is_at_path()
    os.close(file.fd)


def test_file_system_without_direct_io_uses_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    file = open_file(tmp_path / "kv")
    monkeypatch.undo()
    assert not file.is_direct
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert os.pwrite(file.fd, b"odd", 5) == 3
    os.close(file.fd)
