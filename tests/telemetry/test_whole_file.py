"""Atomic replacement of files: only a regular file is ever replaced."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import make_named_pipe

from kvscope_telemetry.credentials.private_files import write_private
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.new_file import new_file
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.whole_file import replace_file, write_whole


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.mcap"
    make_named_pipe(path)
    return path


def test_writing_a_whole_file_replaces_the_earlier_one_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"first")
    write_whole(path, b"second", private=True, sync=True)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_named_pipe, "a named pipe"),
        (os.mkdir, "a folder"),
        (make_socket, "a socket"),
    ],
)
def test_path_that_is_no_regular_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None], kind: str) -> None:
    path, part = tmp_path / "x", tmp_path / "part"
    make(path)
    before = stat.S_IFMT(path.stat().st_mode)
    part.write_bytes(b"data")
    with pytest.raises(OSError, match=f"it is {kind}, not a file"):
        write_whole(path, b"data")
    with pytest.raises(OSError, match=f"it is {kind}, not a file"):
        replace_file(part, path)
    assert stat.S_IFMT(path.stat().st_mode) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["part", "x"]


def test_link_to_a_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match="it is a device, not a file"):
        write_whole(path, b"data")
    assert path.is_symlink()


def test_recordings_and_keys_refuse_a_pipe(pipe: Path) -> None:
    with pytest.raises(BadInput, match="named pipe"):
        write_private(pipe, "text", "key file")
    with pytest.raises(BadInput, match="already exists"):
        RecordingWriter(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_name_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300 + ".mcap")
    with pytest.raises(BadInput, match="cannot be written: File name too long"):
        RecordingWriter(path)
    with pytest.raises(BadInput, match="cannot be written: File name too long"), new_file(path):
        pass
