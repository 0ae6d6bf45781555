"""Makes Python look as it does on Windows, as far as the viewer and the library can notice: a pytest plugin.

`python -m pytest -p tests.without_linux tests/telemetry tests/app` blocks modules, functions and constants that only
Linux or Unix has, before kvscope is imported, also in child processes that run a module of the viewer or the library.
Engines run as usual. Locks are replaced by an imitation of `msvcrt.locking`. What Windows has and Linux lacks is not
tested.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import getpass
import http.server
import importlib.abc
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Final

import httpx
import numpy
import psutil
import zmq.asyncio
from tests.unix_names import MODULES, OS_NAMES, SIGNALS, SOCKET_NAMES

_USES_THE_ORIGINALS: Final = (
    asyncio,
    getpass,
    http.server,
    multiprocessing.connection,
    httpx,
    numpy,
    psutil,
    zmq.asyncio,
)
"""Modules that use the names on Linux, and so must be imported before the names are blocked."""

_STANDARD_LIBRARY: Final = (os.path.dirname(os.__file__) + os.sep, "<frozen")

OURS: Final = ("kvscope_app", "kvscope_telemetry")
UNBLOCKED: Final = ("kvscope_engine", "warm_server")
"""Words of commands that run engines, or fork."""
SITE_CUSTOMIZE: Final = f"""
import sys

command = " ".join(sys.orig_argv)
if any(name in command for name in {OURS}) and not any(name in command for name in {UNBLOCKED}):
    import tests.without_linux
"""
"""Run by each Python that starts with its folder in PYTHONPATH."""


class _Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _msvcrt() -> ModuleType:
    """Return an imitation of `msvcrt` with locks that are held by an open file, as on Windows."""
    module = ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK, module.LK_UNLCK = 1, 2, 0  # type: ignore[attr-defined]
    flock, exclusive, unlock = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        try:
            flock(descriptor, unlock if mode == 0 else exclusive)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(9)


def _hide_proc(event: str, arguments: tuple[object, ...]) -> None:
    """Let kvscope find no file below /proc. Tests and other packages may read it."""
    if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith("/proc"):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").startswith(OURS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(arguments[0]))


def block() -> None:
    """Block the names in this process."""
    os.environ.setdefault("USERNAME", "tester")  # Windows sets it in every session
    sys.addaudithook(_hide_proc)
    subprocess.Popen.kill = _kill  # type: ignore[method-assign, assignment]
    for name in ("_pytest.pathlib", "_pytest.tmpdir"):
        if name in sys.modules:
            sys.modules[name].get_user_id = lambda: None  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = _msvcrt()
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Blocker())
    for owner, names in ((os, OS_NAMES), (signal, SIGNALS), (socket, SOCKET_NAMES)):
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)

    import kvscope_telemetry.operating_system

    kvscope_telemetry.operating_system._PROCESSES = Path("/nowhere")  # type: ignore[misc]


def block_in_children() -> None:
    """Let the child processes of this process that run a module of kvscope block the names, too."""
    folder = Path(tempfile.mkdtemp(prefix="without-linux-"))
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    root = Path(__file__).resolve().parents[1]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), str(root), before)))


block()
if "without-linux-" not in os.environ.get("PYTHONPATH", ""):
    block_in_children()
