"""Engines on one GPU: each plans while no other takes memory, and knows what the others have yet to take."""

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
    """A process of its own, which has its turn."""

    def __init__(self, folder: Path, uuids: str = GPU) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(folder), uuids], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._said() == "turn"

    def does(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._said() == "done"

    def is_killed(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., OtherEngine]]:
    with ExitStack() as undo:

        def start(uuids: str = GPU) -> OtherEngine:
            engine = OtherEngine(tmp_path, uuids)
            undo.callback(engine.is_killed)
            return engine

        yield start


@pytest.fixture
def register(tmp_path: Path) -> Iterator[GpuRegister]:
    register = GpuRegister(tmp_path)
    yield register
    register.close()


def turn(register: GpuRegister, *uuids: str, after: Callable[[], object] | None = None) -> tuple[bool, list[str]]:
    """Whether there was one, and what was told; while it waits `after` happens, or nothing."""
    told: list[str] = []
    limit_s = 0.0 if after is None else 60.0
    pending = [after] if after is not None else []
    got = register.await_turn(uuids or (GPU,), told.append, limit_s, lambda _: pending and pending.pop()())
    return got, told


def test_one_waits_until_the_other_has_taken_its_memory(
    register: GpuRegister, other: Callable[..., OtherEngine]
) -> None:
    first = other()
    line = f"for another kvscope engine (pid {first.pid}), which takes memory of the same GPU"
    assert turn(register) == (False, [line]), "one that hangs keeps nobody from starting"
    assert turn(register, after=lambda: first.does("end")) == (True, [line])


def test_a_killed_engine_is_not_waited_for(register: GpuRegister, other: Callable[..., OtherEngine]) -> None:
    first = other()
    assert turn(register, after=first.is_killed)[0]


def test_another_gpu_is_nobodys_business(register: GpuRegister, other: Callable[..., OtherEngine]) -> None:
    other("cccc")
    assert turn(register) == (True, [])


def test_engines_on_several_gpus_wait_for_each_of_them(
    register: GpuRegister, other: Callable[..., OtherEngine]
) -> None:
    first = other("bbbb")
    assert not turn(register, "aaaa", "bbbb")[0]
    assert turn(register, "aaaa", "bbbb", after=lambda: first.does("end"))[0]


def test_what_an_engine_has_yet_to_take_is_known_as_long_as_it_lives(
    tmp_path: Path, other: Callable[..., OtherEngine]
) -> None:
    first = other()
    first.does("end")
    second = other()
    assert promised_bytes(GPU, tmp_path) == 0
    first.does(3 << 30)
    second.does(1 << 30)
    assert promised_bytes(GPU, tmp_path) == 4 << 30
    assert promised_bytes("cccc", tmp_path) == promised_bytes("", tmp_path) == 0
    first.does(1 << 20)
    assert promised_bytes(GPU, tmp_path) == (1 << 30) + (1 << 20)
    first.is_killed()
    assert promised_bytes(GPU, tmp_path) == 1 << 30
    second.does("close")
    assert promised_bytes(GPU, tmp_path) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".turn"], "nothing is left of either"


def test_what_this_engine_promised_is_in_its_own_plan(tmp_path: Path, register: GpuRegister) -> None:
    assert turn(register)[0]
    register.publish(5 << 30)
    assert promised_bytes(GPU, tmp_path) == 0
    register.close()
    assert turn(register)[0], "another engine in this process"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    register = GpuRegister(tmp_path / "gpus")
    assert turn(register) == (True, [])
    register.publish(1)
    register.end_turn()
    register.close()
    assert promised_bytes(GPU, tmp_path / "gpus") == 0


def test_its_folders_are_for_this_user_alone(tmp_path: Path) -> None:
    """Engines put their sockets beside them, and take no folder that others can write to."""
    before = os.umask(0o002)
    try:
        register = GpuRegister(tmp_path / "kvscope" / "gpus")
        assert turn(register) == (True, [])
        register.close()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "kvscope", tmp_path / "kvscope" / "gpus")] == [
        0o700
    ] * 2


def test_a_folder_that_others_can_write_to_is_done_without(tmp_path: Path) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / f"{GPU}.1").write_text("5")
    register = GpuRegister(folder)
    assert turn(register) == (True, [])
    register.close()
    assert promised_bytes(GPU, folder) == 0
    assert [path.name for path in folder.iterdir()] == [f"{GPU}.1"]


def test_every_engine_of_a_user_finds_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    inside = default_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_folder() == inside


def test_a_forked_child_keeps_no_turn(register: GpuRegister, tmp_path: Path) -> None:
    assert turn(register)[0]
    copy = os.dup(register._turn_locks[0])  # as a child has it
    register.end_turn()
    try:
        second = GpuRegister(tmp_path)
        assert turn(second) == (True, [])
        second.close()
    finally:
        os.close(copy)


def test_a_folder_that_is_a_file_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text("")
    register = GpuRegister(tmp_path / "gpus")
    assert turn(register) == (True, [])
    register.publish(1)
    register.close()
    assert promised_bytes(GPU, tmp_path / "gpus") == 0
