"""Tests that the viewer and the library work without what only Linux has, and of `operating_system` itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvscope_telemetry.operating_system import is_locked, lock, process_start, stored_bytes

ROOT = Path(__file__).resolve().parents[2]
LINUX_MODULES = frozenset(("curses", "fcntl", "grp", "msvcrt", "pwd", "resource", "syslog", "termios", "tty"))
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
                    found |= {(name, alias.name) for alias in node.names if alias.name in LINUX_MODULES}
                elif isinstance(node, ast.ImportFrom) and node.module in LINUX_MODULES:
                    found.add((name, node.module))
    assert found == ALLOWED


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
