"""The compiled library is built once and kept, and everything works without it; each case runs in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope_kernels.cpu import compiler
from kvscope_kernels.cpu.compiler import ENABLE_VARIABLE, OPTIONS_VARIABLE
from kvscope_kernels.cpu.library import library

PROGRAM = f"""
import importlib.util, os
spec = importlib.util.spec_from_file_location("compiler", {compiler.__file__!r})  # without importing torch
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)
compiler.TIMEOUT_SECONDS = float(os.environ.get("PATIENCE", "600"))
print(compiler.must_build(), compiler.built_library())
"""


def library_in_new_process(cache: Path, **changes: str) -> str:
    """Return which library a process with these variables loads, and whether it had to build it."""
    environment = {name: value for name, value in os.environ.items() if name not in (ENABLE_VARIABLE, "XDG_CACHE_HOME")}
    environment |= {"KVSCOPE_CACHE": str(cache), "HOME": str(cache / "home"), OPTIONS_VARIABLE: "-O0", **changes}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert not run.stderr
    return run.stdout.strip()


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_c_kernel_library_is_compiled_once_and_reused(tmp_path: Path) -> None:
    printed, first = library_in_new_process(tmp_path).split()
    assert printed == "True"
    assert Path(first).parent == tmp_path / "native"
    made = Path(first).stat().st_mtime_ns
    assert library_in_new_process(tmp_path) == f"False {first}"
    assert Path(first).stat().st_mtime_ns == made
    assert [path.suffix for path in sorted((tmp_path / "native").iterdir())] == [".lock", ".so"]
    (tmp_path / "native").chmod(0o777)  # it may contain the code of another user
    assert library_in_new_process(tmp_path) == "True None"


def test_c_kernel_library_is_not_used_without_a_compiler(tmp_path: Path) -> None:
    assert library_in_new_process(tmp_path, PATH=str(tmp_path)) == "False None"


def test_c_kernel_library_disabled_by_the_environment_is_not_compiled(tmp_path: Path) -> None:
    assert library_in_new_process(tmp_path, **{ENABLE_VARIABLE: "0"}) == "False None"
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("script", ["exit 1", "for last; do :; done; touch kept; exit 0"])
def test_c_kernel_library_is_not_used_if_the_compiler_fails(tmp_path: Path, script: str) -> None:
    """The compiler fails, or makes a file that cannot be loaded."""
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    assert library_in_new_process(tmp_path, PATH=str(fake.parent)) == "True None"


def test_c_kernel_library_is_not_used_if_its_cache_folder_is_impossible(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert library_in_new_process(tmp_path / "file") == "True None"


def test_compiler_that_does_not_end_is_killed_with_its_processes(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "cc"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n/bin/sleep 600 & echo $! >> {tmp_path}/started\nwait\n")
    fake.chmod(0o755)
    assert library_in_new_process(tmp_path, PATH=str(fake.parent), PATIENCE="3") == "True None"
    started = (tmp_path / "started").read_text().split()
    assert started
    for pid in started:
        stat = Path(f"/proc/{pid}/stat")
        assert (
            not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        )  # a zombie that no process waits for
