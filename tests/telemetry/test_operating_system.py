"""Tests that the viewer and the library work without what only Linux has, and of `operating_system` itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.unix_names import MODULES, OS_NAMES, SIGNALS, SOCKET_NAMES

from kvscope_telemetry import operating_system
from kvscope_telemetry.operating_system import is_locked, lock, process_start, stored_bytes

ROOT = Path(__file__).resolve().parents[2]
FOREIGN_MODULES = frozenset((*MODULES, "msvcrt"))
ALLOWED = {
    ("kvscope_telemetry/operating_system.py", name) for name in ("fcntl", "msvcrt", "pwd", "resource", "termios")
} | {("kvscope_app/commands/top_screen.py", "curses")}


def run_without_linux(code: str) -> str:
    """Run `code` in a process in which `tests.without_linux` blocks what only Linux has. Returns what it prints."""
    program = "import tests.without_linux\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_the_platform_module_imports_what_other_systems_lack() -> None:
    found = set()
    for folder in ("app/kvscope_app", "engine/kvscope_telemetry"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to((ROOT / folder).parent).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {(name, alias.name) for alias in node.names if alias.name in FOREIGN_MODULES}
                elif isinstance(node, ast.ImportFrom) and node.module in FOREIGN_MODULES:
                    found.add((name, node.module))
    assert found == ALLOWED


def test_viewer_and_library_use_no_name_that_only_unix_has() -> None:
    names = frozenset((*OS_NAMES, *SIGNALS, *SOCKET_NAMES))
    found = set()
    for folder in ("app/kvscope_app", "engine/kvscope_telemetry"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in names:
                    found.add((path.name, f"{node.value.id}.{node.attr}"))
    assert {each for each in found if each[0] != "operating_system.py"} == {
        ("connection_watch.py", "socket.TCP_INFO"),  # expects AttributeError
        ("processes.py", "os.sysconf"),  # asks whether there is one
    }


def test_rename_is_tried_again_while_another_program_has_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, failures = tmp_path / "a", tmp_path / "b", [PermissionError(), PermissionError()]
    source.write_text("new")
    target.write_text("old")
    replace = os.replace

    def busy_twice(a: Path, b: Path) -> None:
        if failures:
            raise failures.pop()
        replace(a, b)

    monkeypatch.setattr(operating_system, "HAS_FILE_MODES", False)
    monkeypatch.setattr(os, "replace", busy_twice)
    operating_system.rename(source, target)
    assert target.read_text() == "new"
    assert not source.exists()


def test_every_module_of_viewer_and_library_can_be_imported_without_linux() -> None:
    printed = run_without_linux(
        """
        import importlib, pkgutil

        names = []
        for package in ("kvscope_telemetry", "kvscope_app"):
            module = importlib.import_module(package)
            names += [each.name for each in pkgutil.walk_packages(module.__path__, package + ".")]
        for name in names:
            if not name.endswith((".__main__", ".top_screen")):
                importlib.import_module(name)
        print(len(names))
        """
    )
    assert int(printed) > 600


def test_locked_file_is_refused_to_others_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("r+b") as first, path.open("r+b") as second:
        assert not is_locked(second.fileno())
        lock(first.fileno(), wait=False)
        assert is_locked(second.fileno())
        with pytest.raises(BlockingIOError):
            lock(second.fileno(), wait=False)
    with path.open("r+b") as third:
        lock(third.fileno(), wait=False)


def test_locks_by_windows_functions_behave_like_those_of_linux(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"text")
    printed = run_without_linux(
        f"""
        from kvscope_telemetry.operating_system import is_locked, lock

        with open({str(path)!r}, "r+b") as first, open({str(path)!r}, "r+b") as second:
            print(is_locked(second.fileno()))
            lock(first.fileno(), wait=False)
            print(is_locked(second.fileno()), second.read())
            try:
                lock(second.fileno(), wait=False)
            except BlockingIOError:
                print("refused")
        """
    )
    assert printed.splitlines() == ["False", "True b'text'", "refused"]


def test_start_of_an_ended_process_is_none() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process_start(process.pid) == process_start(process.pid)
        assert process_start(process.pid)
        process.kill()
        process.wait()
    assert process_start(process.pid) is None


def test_holes_of_a_sparse_file_are_not_counted_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert stored_bytes(path.stat()) < 1 << 20
