"""Where the compiled library comes from, and that without one all goes on: each case in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope_kernels.cpu import compiler
from kvscope_kernels.cpu.compiler import MORE_OPTIONS, SWITCH
from kvscope_kernels.cpu.library import library

PROGRAM = f"""
import importlib.util, os
spec = importlib.util.spec_from_file_location("compiler", {compiler.__file__!r})  # without torch, which takes seconds
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)
compiler.TIMEOUT_SECONDS = float(os.environ.get("PATIENCE", "600"))
print(compiler.must_build(), compiler.built_library())
"""


def built(cache: Path, **changes: str) -> str:
    """What a process with these variables has for a library, and whether it knew that it had to build it."""
    environment = {name: value for name, value in os.environ.items() if name not in (SWITCH, "XDG_CACHE_HOME")}
    environment |= {"KVSCOPE_CACHE": str(cache), "HOME": str(cache / "home"), MORE_OPTIONS: "-O0", **changes}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert not run.stderr
    return run.stdout.strip()


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_built_once_and_kept(tmp_path: Path) -> None:
    printed, first = built(tmp_path).split()
    assert printed == "True"
    assert Path(first).parent == tmp_path / "native"
    made = Path(first).stat().st_mtime_ns
    assert built(tmp_path) == f"False {first}"
    assert Path(first).stat().st_mtime_ns == made
    assert [path.suffix for path in sorted((tmp_path / "native").iterdir())] == [".lock", ".so"]
    (tmp_path / "native").chmod(0o777)  # somebody else's code may lie there
    assert built(tmp_path) == "True None"


def test_without_a_compiler(tmp_path: Path) -> None:
    assert built(tmp_path, PATH=str(tmp_path)) == "False None"


def test_switched_off(tmp_path: Path) -> None:
    assert built(tmp_path, **{SWITCH: "0"}) == "False None"
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("script", ["exit 1", "for last; do :; done; touch kept; exit 0"])
def test_a_compiler_that_does_not_work(tmp_path: Path, script: str) -> None:
    """It fails, or makes nothing that can be loaded."""
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    assert built(tmp_path, PATH=str(fake.parent)) == "True None"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert built(tmp_path / "file") == "True None"


def test_a_compiler_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n/bin/sleep 600 & echo $! >> {tmp_path}/started\nwait\n")
    fake.chmod(0o755)
    assert built(tmp_path, PATH=str(fake.parent), PATIENCE="3") == "True None"
    started = (tmp_path / "started").read_text().split()
    assert started
    for pid in started:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody's to wait for
