"""The cache folder: where it is, and that incomplete files are never seen in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvscope_engine.cache_folder import cache_folder, file_lock, replace_folder, scratch_folder
from kvscope_telemetry.errors import KvscopeError


def test_most_specific_setting_of_the_cache_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSCOPE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvscope"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvscope"
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert cache_folder().is_dir()


def test_impossible_cache_folder_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(KvscopeError, match="KVSCOPE_CACHE"):
        cache_folder()


def test_scratch_folder_is_removed_after_use_and_after_errors(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "parent") as scratch:
        (scratch / "half").write_bytes(b"x")
    with pytest.raises(ZeroDivisionError), scratch_folder(tmp_path / "parent"):
        _ = 1 / 0
    assert list((tmp_path / "parent").iterdir()) == []


def test_scratch_folder_of_a_killed_process_is_removed_and_one_in_use_stays(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from kvscope_engine.cache_folder import scratch_folder\n"
        f"with scratch_folder(pathlib.Path({str(tmp_path)!r})) as folder:\n"
        "    (folder / 'weights').write_bytes(b'x')\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().decode().strip())
        with scratch_folder(tmp_path):
            assert (theirs / "weights").exists(), "its process lives"
        other.kill()
    assert theirs.exists()
    (tmp_path / "tmp-a-file").write_bytes(b"")
    with scratch_folder(tmp_path) as mine:
        assert mine.exists()
        assert not theirs.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp-a-file"]


def test_replace_folder_replaces_the_old_contents(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / folder.name).write_bytes(b"")
    replace_folder(new, old)
    assert [path.name for path in old.iterdir()] == ["new"]
    assert not new.exists()


def test_file_lock_lets_one_thread_in_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with file_lock(tmp_path / "x"):
            inside.set()
            leave.wait(60)
            order.append("first")

    def second() -> None:
        inside.wait(60)
        with file_lock(tmp_path / "x"):
            order.append("second")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    threads[1].join(0.05)  # long enough for it to wait, or to enter wrongly
    leave.set()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second"]


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_lock_that_is_no_regular_file_is_named_in_the_error(tmp_path: Path, kind: str) -> None:
    lock, target = tmp_path / "entry.lock", tmp_path / "elsewhere"
    if kind == "link":
        lock.symlink_to(target)
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with (
        pytest.raises(KvscopeError, match=r"entry\.lock.* is not a regular file .* remove it"),
        file_lock(tmp_path / "entry"),
    ):
        pass
    assert not target.exists(), "the link was followed"


def test_unwritable_cache_folder_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(KvscopeError, match=r"Permission denied; .* KVSCOPE_CACHE"), file_lock(tmp_path / "entry"):
        pass
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(KvscopeError, match=r"Permission denied; .* KVSCOPE_CACHE"), scratch_folder(tmp_path):
        pass
