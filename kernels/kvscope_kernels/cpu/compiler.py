"""Compilation of the C sources in this directory for this CPU, and the cache of compiled libraries.

Owns the compiler's name and options, the library's file name (a hash of sources, options and CPU, so that another CPU
or version builds its own) and the trial in a separate process, where an illegal instruction does no harm. On a machine
without compiler, disk space or permissions there is no library, and no error is raised. See
docs/internals/decisions/0013-cpu-operations-are-compiled-where-they-run.md.
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

SWITCH: Final = "KVSCOPE_NATIVE"
"""Environment variable; the value 0 disables compilation and loading."""
MORE_OPTIONS: Final = "KVSCOPE_NATIVE_OPTIONS"
"""Environment variable with additional compiler options, such as `-march=haswell` for the code paths of other CPUs."""
SOURCES: Final = ("linear.c", "grouped.c", "grouped_float.c", "attention.c", "prefill.c", "layers.c", "layer.c")
HEADERS: Final = ("numbers.h", "grouped.h", "decode.h", "rotation.h")
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
    """Return the library's path, or None if it cannot be built. Compiles it if there is none for this CPU."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        name = _name(compiler)
        return _found(name) or _built(compiler, next(_folders()) / name)
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home directory
        return None


def must_build() -> bool:
    """Whether `built_library` would compile first, which delays the caller."""
    compiler = _compiler()
    try:
        return compiler is not None and _found(_name(compiler)) is None
    except (OSError, RuntimeError):
        return False


def compiler_refusal() -> str:
    """Return the reason why nothing is compiled on this machine, or "" if there is a compiler."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if sys.platform != "linux":
        return "C operations are compiled on Linux only"
    return "" if any(map(shutil.which, _COMPILERS)) else f"no C compiler is installed ({', '.join(_COMPILERS)})"


def _compiler() -> str | None:
    return None if compiler_refusal() else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _name(compiler: str) -> str:
    return f"kvscope-{_key(compiler)}.so"


def _found(name: str) -> Path | None:
    found = (folder / name for folder in _folders() if (folder / name).exists() and _is_ours(folder))
    return next(found, None)


def _built(compiler: str, library: Path) -> Path | None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(library.parent):
        return None
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process releases it within the timeout
        return library if library.exists() or _build(compiler, library) else None


def _build(compiler: str, library: Path) -> bool:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        objects = [f"{scratch}/{name}.o" for name in SOURCES]
        compiling = [
            [compiler, *_options(), "-c", "-o", one, str(here / name)]
            for name, one in zip(SOURCES, objects, strict=True)
        ]
        linking = [compiler, *_options(), "-shared", "-o", str(made), *objects, "-lm"]
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL, str(made)]
        if not (_succeed(compiling) and _succeed([linking]) and _succeed([trial])):
            return False
        os.replace(made, library)
    return True


def _succeed(commands: list[list[str]]) -> bool:
    """Run commands in parallel, and return whether all succeeded. They and their child processes have ended on
    return.
    """
    until, running = time.monotonic() + TIMEOUT_SECONDS, list[subprocess.Popen[bytes]]()
    quiet = subprocess.DEVNULL
    try:
        for command in commands:
            process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            running.append(process)
        return all(process.wait(max(0.0, until - time.monotonic())) == 0 for process in running)
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _folders() -> Iterator[Path]:
    """Yield the folders in which the library may be; it is built in the first."""
    own = os.environ.get("KVSCOPE_CACHE")
    if own:
        yield Path(own) / "native"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvscope" / "native"


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write to the folder, so that code may be loaded from it."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _options() -> tuple[str, ...]:
    return (*OPTIONS, *os.environ.get(MORE_OPTIONS, "").split())


def _key(compiler: str) -> str:
    """Return a hash of everything that affects the compiled library."""
    here = Path(__file__).parent
    texts = [(here / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    facts = (*_options(), os.path.realpath(compiler), platform.machine(), _cpu())
    return hashlib.sha256(b"\0".join([*texts, *map(str.encode, facts)])).hexdigest()[:16]


def _cpu() -> str:
    """Return name and features of the first CPU; "" without /proc."""
    words = ("model name", "flags", "features", "cpu implementer", "cpu part")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.lower().startswith(words))
