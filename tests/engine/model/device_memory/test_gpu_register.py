"""Several engines on one GPU: each plans while no other allocates, and knows what the others have yet to allocate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvscope_engine.model.device_memory.gpu_register import GpuRegister, default_folder, promised_bytes

ENGINE = """
import sys
from pathlib import Path
from kvscope_engine.model.device_memory.gpu_register import GpuRegister
register = GpuRegister(Path(sys.argv[1]))
assert register.await_turn(sys.argv[2].split(","), print)
print("turn", flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        register.end_turn()
    elif line.strip() == "close":
        register.close()
    else:
        register.publish(int(line))
    print("done", flush=True)
"""
GPU = "aaaa-bbbb"


class OtherEngine:
    """Another process that holds the turn of a GPU."""

    def __init__(self, folder: Path, uuids: str = GPU) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(folder), uuids], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._said() == "turn"

    def run_command(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._said() == "done"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def start_other_engine(tmp_path: Path) -> Iterator[Callable[..., OtherEngine]]:
    with ExitStack() as undo:

        def start(uuids: str = GPU) -> OtherEngine:
            engine = OtherEngine(tmp_path, uuids)
            undo.callback(engine.kill)
            return engine

        yield start


@pytest.fixture
def register(tmp_path: Path) -> Iterator[GpuRegister]:
    register = GpuRegister(tmp_path)
    yield register
    register.close()


def wait_for_turn(
    register: GpuRegister, *uuids: str, after: Callable[[], object] | None = None
) -> tuple[bool, list[str]]:
    """Return whether the turn was obtained, and the notices. While waiting, `after` is called if given."""
    told: list[str] = []
    limit_s = 0.0 if after is None else 60.0
    pending = [after] if after is not None else []
    got = register.await_turn(uuids or (GPU,), told.append, limit_s, lambda _: pending and pending.pop()())
    return got, told


def test_engine_waits_until_the_other_has_allocated(
    register: GpuRegister, start_other_engine: Callable[..., OtherEngine]
) -> None:
    first = start_other_engine()
    line = f"for another kvscope engine (pid {first.pid}), which takes memory of the same GPU"
    assert wait_for_turn(register) == (False, [line]), "a hanging engine must not prevent a start"
    assert wait_for_turn(register, after=lambda: first.run_command("end")) == (True, [line])


def test_killed_engine_is_not_waited_for(register: GpuRegister, start_other_engine: Callable[..., OtherEngine]) -> None:
    first = start_other_engine()
    assert wait_for_turn(register, after=first.kill)[0]


def test_engine_on_another_gpu_is_not_waited_for(
    register: GpuRegister, start_other_engine: Callable[..., OtherEngine]
) -> None:
    start_other_engine("cccc")
    assert wait_for_turn(register) == (True, [])


def test_engine_on_several_gpus_waits_for_each(
    register: GpuRegister, start_other_engine: Callable[..., OtherEngine]
) -> None:
    first = start_other_engine("bbbb")
    assert not wait_for_turn(register, "aaaa", "bbbb")[0]
    assert wait_for_turn(register, "aaaa", "bbbb", after=lambda: first.run_command("end"))[0]


def test_promised_bytes_count_while_the_engine_lives(
    tmp_path: Path, start_other_engine: Callable[..., OtherEngine]
) -> None:
    first = start_other_engine()
    first.run_command("end")
    second = start_other_engine()
    assert promised_bytes(GPU, tmp_path) == 0
    first.run_command(3 << 30)
    second.run_command(1 << 30)
    assert promised_bytes(GPU, tmp_path) == 4 << 30
    assert promised_bytes("cccc", tmp_path) == promised_bytes("", tmp_path) == 0
    first.run_command(1 << 20)
    assert promised_bytes(GPU, tmp_path) == (1 << 30) + (1 << 20)
    first.kill()
    assert promised_bytes(GPU, tmp_path) == 1 << 30
    second.run_command("close")
    assert promised_bytes(GPU, tmp_path) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".turn"], "files of ended engines must be removed"


def test_gpu_memory_announced_by_this_process_itself_does_not_count(tmp_path: Path, register: GpuRegister) -> None:
    assert wait_for_turn(register)[0]
    register.publish(5 << 30)
    assert promised_bytes(GPU, tmp_path) == 0
    register.close()
    assert wait_for_turn(register)[0], "another engine in this process must get the turn"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_engine_starts_without_the_gpu_register_if_its_folder_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    register = GpuRegister(tmp_path / "gpus")
    assert wait_for_turn(register) == (True, [])
    register.publish(1)
    register.end_turn()
    register.close()
    assert promised_bytes(GPU, tmp_path / "gpus") == 0


def test_gpu_register_folders_are_accessible_to_the_owner_only(tmp_path: Path) -> None:
    """Engines put their sockets next to them, and refuse folders that others can write to."""
    before = os.umask(0o002)
    try:
        register = GpuRegister(tmp_path / "kvscope" / "gpus")
        assert wait_for_turn(register) == (True, [])
        register.close()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "kvscope", tmp_path / "kvscope" / "gpus")] == [
        0o700
    ] * 2


def test_gpu_register_folder_writable_by_others_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / f"{GPU}.1").write_text("5")
    register = GpuRegister(folder)
    assert wait_for_turn(register) == (True, [])
    register.close()
    assert promised_bytes(GPU, folder) == 0
    assert [path.name for path in folder.iterdir()] == [f"{GPU}.1"]


def test_gpu_register_folder_does_not_depend_on_xdg_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    inside = default_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_folder() == inside


def test_forked_child_does_not_keep_the_gpu_allocation_lock(register: GpuRegister, tmp_path: Path) -> None:
    assert wait_for_turn(register)[0]
    copy = os.dup(register._turn_locks[0])  # like a forked child
    register.end_turn()
    try:
        second = GpuRegister(tmp_path)
        assert wait_for_turn(second) == (True, [])
        second.close()
    finally:
        os.close(copy)


def test_engine_starts_without_the_gpu_register_if_a_file_is_in_place_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("")
    register = GpuRegister(tmp_path / "gpus")
    assert wait_for_turn(register) == (True, [])
    register.publish(1)
    register.close()
    assert promised_bytes(GPU, tmp_path / "gpus") == 0
