"""Which files are taken, and whose are left alone."""

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


def take(path: Path | None, *, keep: bool = True) -> OpenFile:
    return open_disk_file(path, SIZE, keep=keep)


def test_a_kept_file_is_ours_alone_and_has_its_whole_size(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = take(path)
    status = path.stat()
    assert (status.st_size, status.st_mode & 0o777) == (SIZE, 0o600)
    assert status.st_blocks * 512 >= SIZE, "its blocks are not taken yet"
    with pytest.raises(BadInput, match=r"is in use by another engine|not kvscope's"):
        take(path)
    index_path(path).touch()
    with pytest.raises(BadInput, match=r"'.*kv' is in use by another engine"):
        take(path)
    os.close(file.fd)
    again = take(path)
    assert again.previous_bytes == SIZE
    os.close(again.fd)


def test_without_keeping_the_name_is_gone_at_once(tmp_path: Path, own_cache: Path) -> None:
    for path in (tmp_path / "kv", None):
        file = take(path, keep=False)
        assert os.fstat(file.fd).st_nlink == 0
        assert file.is_at_path()
        os.close(file.fd)
    assert not (tmp_path / "kv").exists()
    assert list(own_cache.iterdir()) == []


def test_what_somebody_else_wrote_is_left_alone(tmp_path: Path, open_fds: Callable[[], int]) -> None:
    path, before = tmp_path / "thesis.txt", open_fds()
    path.write_text("years of work")
    for keep in (True, False):
        with pytest.raises(BadInput, match=r"has 13 bytes that are not kvscope's .* remove it or name another"):
            take(path, keep=keep)
    assert path.read_text() == "years of work"
    assert open_fds() == before


def test_only_regular_files_in_folders_that_are_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is no regular file"):
        take(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"cannot make the KV cache's file .*: Is a directory"):
        take(tmp_path)
    with pytest.raises(BadInput, match=r"cannot make the KV cache's file at '.*nowhere/kv': No such file"):
        take(tmp_path / "nowhere" / "kv")


def test_it_notices_that_its_name_was_taken(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    file = take(path)
    assert file.is_at_path()
    path.unlink()
    assert not file.is_at_path()
    path.touch()
    assert not file.is_at_path()
    os.close(file.fd)


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    file = take(tmp_path / "kv")
    monkeypatch.undo()
    assert not file.is_direct
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert os.pwrite(file.fd, b"odd", 5) == 3
    os.close(file.fd)
