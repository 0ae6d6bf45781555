"""Makes Python look as it does on Windows, as far as the viewer and the library can notice: a pytest plugin.

`python -m pytest -p tests.without_linux tests/telemetry tests/app` blocks modules, functions and constants that only
Linux or Unix has, before kvscope is imported. Locks are replaced by an imitation of `msvcrt.locking`. What Windows has
and Linux lacks is not tested.
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
import struct
import subprocess
import sys
from types import ModuleType
from typing import Final

import _pytest.pathlib
import _pytest.tmpdir
import httpx
import numpy
import zmq.asyncio

_USES_THE_ORIGINALS: Final = (asyncio, getpass, http.server, multiprocessing.connection, httpx, numpy, zmq.asyncio)
"""Modules that use the names on Linux, and so must be imported before the names are blocked."""

MODULES: Final = ("curses", "fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
OS_NAMES: Final = (
    *("fchmod", "fork", "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg", "mkfifo", "nice", "pread"),
    *("pwrite", "sched_getaffinity", "sched_setaffinity", "setsid", "statvfs", "sysconf", "uname", "writev"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK"),
)
SIGNALS: Final = ("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP")
SOCKET_NAMES: Final = ("SO_PEERCRED", "TCP_INFO")


class _Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _msvcrt() -> ModuleType:
    """Return an imitation of `msvcrt` with locks of one byte that are held by an open file, as on Windows."""
    module = ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK, module.LK_UNLCK = 1, 2, 0  # type: ignore[attr-defined]
    lock, write, unlock = fcntl.F_OFD_SETLK, fcntl.F_WRLCK, fcntl.F_UNLCK
    call = fcntl.fcntl

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        kind = unlock if mode == 0 else write
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            call(descriptor, lock, struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, num_bytes, 0))
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(9)


def block() -> None:
    """Block the names in this process."""
    subprocess.Popen.kill = _kill  # type: ignore[method-assign, assignment]
    for module in (_pytest.pathlib, _pytest.tmpdir):
        module.get_user_id = lambda: None  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = _msvcrt()
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Blocker())
    for owner, names in ((os, OS_NAMES), (signal, SIGNALS), (socket, SOCKET_NAMES)):
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)


block()
