"""Compilation of the C sources in this directory for this CPU, and the cache of compiled libraries.

Defines the compiler's name and options and the library's file name. The file name is a hash of sources, options and
CPU, so that another CPU or version gets another library. A new library is first tried in a separate process, where an
illegal instruction does no harm. On a machine without compiler, disk space or permissions there is no library, and no
error is raised. See docs/internals/decisions/0013-cpu-operations-are-compiled-where-they-run.md.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ENABLE_VARIABLE: Final = "KVSCOPE_NATIVE"
"""Environment variable whose value 0 disables compiling and loading the library."""
OPTIONS_VARIABLE: Final = "KVSCOPE_NATIVE_OPTIONS"
"""Environment variable with additional compiler options, such as `-march=haswell` to test the code paths of
other CPUs.
"""
SOURCES: Final = (
    *("linear.c", "grouped.c", "grouped_float.c", "grouped_tiles.c", "attention.c", "prefill.c"),
    *("layers.c", "layer.c"),
)
HEADERS: Final = ("numbers.h", "grouped.h", "grouped_tiles.h", "decode.h", "rotation.h")
OPTIONS: Final = (
    *("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-fvisibility=hidden", "-w"),
)
TIMEOUT_SECONDS: Final = 600.0
"""Timeout of compilation, after which the engine starts without the library.

The largest source takes 25 s of CPU time.
"""
_COMPILERS: Final = ("cc", "gcc", "clang")
_TRIAL: Final = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).kvscope_trial())"


def built_library() -> Path | None:
    """Return the library's path, or None if it cannot be built. Compiles the library if there is none for this CPU."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        name = _library_name(compiler)
        return _existing_library(name) or _build_once(compiler, next(_folders()) / name)
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home directory
        return None


def must_build() -> bool:
    """Whether `built_library` would compile first, which delays the caller."""
    compiler = _compiler()
    try:
        return compiler is not None and _existing_library(_library_name(compiler)) is None
    except (OSError, RuntimeError):
        return False


def compiler_refusal() -> str:
    """Return the reason why nothing is compiled on this machine, or "" if there is a compiler."""
    if os.environ.get(ENABLE_VARIABLE) == "0":
        return f"{ENABLE_VARIABLE}=0 is set"
    if sys.platform != "linux":
        return "C operations are compiled on Linux only"
    return "" if any(map(shutil.which, _COMPILERS)) else f"no C compiler is installed ({', '.join(_COMPILERS)})"


def _compiler() -> str | None:
    return None if compiler_refusal() else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _library_name(compiler: str) -> str:
    return f"kvscope-{_build_key(compiler)}.so"


def _existing_library(name: str) -> Path | None:
    found = (folder / name for folder in _folders() if (folder / name).exists() and _is_ours(folder))
    return next(found, None)


def _build_once(compiler: str, library: Path) -> Path | None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(library.parent):
        return None
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process releases it within the timeout
        return library if library.exists() or _build(compiler, library) else None


def _build(compiler: str, library: Path) -> bool:
    source_folder = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        built_file = Path(scratch) / library.name
        objects = [f"{scratch}/{name}.o" for name in SOURCES]
        compiling = [
            [compiler, *_compiler_options(), "-c", "-o", object_file, str(source_folder / name)]
            for name, object_file in zip(SOURCES, objects, strict=True)
        ]
        linking = [compiler, *_compiler_options(), "-shared", "-o", str(built_file), *objects, "-lm"]
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL, str(built_file)]
        if not (_run_all(compiling) and _run_all([linking]) and _run_all([trial])):
            return False
        os.replace(built_file, library)
    return True


def _run_all(commands: list[list[str]]) -> bool:
    """Run commands in parallel, and return whether all succeeded. The commands and their child processes have
    ended on return.
    """
    deadline_s, running = time.monotonic() + TIMEOUT_SECONDS, list[subprocess.Popen[bytes]]()
    devnull = subprocess.DEVNULL
    try:
        for command in commands:
            process = subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True)
            running.append(process)
        return all(process.wait(max(0.0, deadline_s - time.monotonic())) == 0 for process in running)
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _folders() -> Iterator[Path]:
    """Yield the folders that are searched for the library. It is built in the first."""
    own = os.environ.get("KVSCOPE_CACHE")
    if own:
        yield Path(own) / "native"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvscope" / "native"


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write to the folder, so that code may be loaded from it."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiler_options() -> tuple[str, ...]:
    return (*OPTIONS, *os.environ.get(OPTIONS_VARIABLE, "").split())


def _build_key(compiler: str) -> str:
    """Return a hash of everything that affects the compiled library."""
    source_folder = Path(__file__).parent
    sources = [(source_folder / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    settings = (*_compiler_options(), os.path.realpath(compiler), platform.machine(), _cpu_description())
    return hashlib.sha256(b"\0".join([*sources, *map(str.encode, settings)])).hexdigest()[:16]


def _cpu_description() -> str:
    """Return name and features of the first CPU; "" without /proc."""
    keys = ("model name", "flags", "features", "cpu implementer", "cpu part")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.lower().startswith(keys))
