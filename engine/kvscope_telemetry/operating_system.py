"""Functions of the operating system that Linux, macOS and Windows offer in different ways: locks, users, processes.

No other module of `kvscope_telemetry` and `kvscope_app` imports a module that only some systems have, such as `fcntl`,
except `curses` in `top_screen` (`tests/telemetry/test_operating_system.py` checks this). Imports no other module of
kvscope.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

fcntl: ModuleType | None
msvcrt: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt
try:
    import pwd
except ImportError:
    pwd = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]
try:
    import termios
except ImportError:
    termios = None  # type: ignore[assignment]

HAS_UNIX_SOCKETS: Final = sys.platform != "win32"
"""Whether `ipc://` endpoints work. libzmq supports them on Windows only without access control."""
HAS_FILE_MODES: Final = sys.platform != "win32"
"""Whether a file's mode says which users can read it. Windows has access control lists instead."""
READ_WITHOUT_BLOCKING: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)  # without it, opening a pipe blocks until the pipe has a writer
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
"""Flags of `os.open` for reading a file that may turn out to be a pipe or a device."""
NEW_FILE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
"""Flags of `os.open` for a file that does not exist yet."""
LOCK_FILE_FLAGS: Final = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags of `os.open` for a lock file. Add `os.O_CREAT` to create a missing one."""

_PROCESSES: Final = Path("/proc")
_UNIX_SOCKETS: Final = Path("/proc/net/unix")
_UNIX_PATH_FIELD: Final = 7
"""Index of the path among the fields of a line of `/proc/net/unix`."""
_UNIX_ACCEPTS: Final = "00010000"
"""Flags of a listening socket in `/proc/net/unix` (the kernel's `__SO_ACCEPTCON`)."""
_START_FIELD: Final = 19
"""Index of the start time, in clock ticks since boot, among the fields of `/proc/PID/stat` after the command name."""
_LOCKED_BYTE: Final = 1 << 43
"""Offset of the byte that a lock covers on Windows, beyond the end of any file: others cannot read locked bytes."""
_RENAME_DELAYS_S: Final = (0.05, 0.1, 0.2, 0.3, 0.4)
_BLOCK_BYTES: Final = 512
"""Number of bytes per unit of `stat`'s `st_blocks`, the same on every file system."""


# Locks of files, which the system releases when the process ends


def lock(descriptor: int, *, wait: bool) -> None:
    """Lock an open file exclusively, until the descriptor is closed.

    Args:
        wait: Wait for other holders of the lock. Otherwise, raise BlockingIOError if there are any.

    Raises OSError on a file system without locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    while True:
        try:
            _lock_byte(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK)
        except BlockingIOError:  # LK_LOCK gives up after ten seconds
            if not wait:
                raise
        else:
            return


def open_for_lock(folder: Path) -> int:
    """Open a folder for `lock`, or on Windows, which cannot lock folders, the file `.lock` in it."""
    if fcntl is not None:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return os.open(folder / ".lock", LOCK_FILE_FLAGS | os.O_CREAT, 0o600)


def is_locked(descriptor: int) -> bool:
    """Whether another descriptor holds an exclusive lock of this file. Raises OSError without support for locks."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            _lock_byte(descriptor, msvcrt.LK_NBLCK)
    except BlockingIOError:
        return True
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    else:
        _lock_byte(descriptor, msvcrt.LK_UNLCK)
    return False


def _lock_byte(descriptor: int, mode: int) -> None:
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, mode, 1)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EDEADLK):
            raise BlockingIOError(error.errno, error.strerror) from None
        raise
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


# Files and users


def stored_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file occupies on disk, at most its size. Holes of a sparse file are not counted, except
    on Windows, which does not report them.
    """
    blocks = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else min(status.st_size, _BLOCK_BYTES * blocks)


def rename(source: Path, target: Path) -> None:
    """Rename a file, replacing `target`. On Windows, tries for a second if another program has one of them open."""
    for delay_s in () if HAS_FILE_MODES else _RENAME_DELAYS_S:
        try:
            os.replace(source, target)
        except PermissionError:
            time.sleep(delay_s)
        else:
            return
    os.replace(source, target)


def is_private(status: os.stat_result) -> bool:
    """Whether a file's mode allows only its owner to access it. True on Windows (`HAS_FILE_MODES`)."""
    return not HAS_FILE_MODES or not stat.S_IMODE(status.st_mode) & 0o077


def is_own(status: os.stat_result) -> bool:
    """Whether a file belongs to this user. True on Windows, where `stat` reports no owner."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def user_name() -> str:
    """Return the name of the user that this process runs as, which only on Windows depends on the environment."""
    if pwd is None:
        return getpass.getuser()
    try:
        return str(pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:  # a container's user may have no name
        return f"user {os.geteuid()}"


def shared_folder() -> Path:
    """Return the user's folder for files that all engines must find, however they were started.

    On Linux and macOS it is in /tmp and not in the runtime directory, because under cron, su and the like there is
    none.
    """
    if hasattr(os, "getuid"):
        return Path(f"/tmp/kvscope-{os.getuid()}")
    return Path(tempfile.gettempdir()) / "kvscope"


def data_folder() -> Path:
    """Return the folder of the user's data for all programs, such as `~/.local/share`."""
    configured = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(configured):
        return Path(configured)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Application Support" if sys.platform == "darwin" else ".local/share")


# Processes


def own_process_group() -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` with which Ctrl-C in the terminal does not reach the child."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def own_session() -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a child without the parent's terminal (see `kill_session`)."""
    return own_process_group() if sys.platform == "win32" else {"start_new_session": True}


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a child that was started with `own_session`, and except on Windows all processes that it started."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def process_start(pid: int) -> int | None:
    """Return a number that differs between processes that had the same id, from the process's start time.

    None if no such process runs; a process that has ended, but that its parent has not waited for, does not run. 0 if
    the start time is unknown.
    """
    if (_PROCESSES / "self").exists():
        return _start_ticks(pid)
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0


def _start_ticks(pid: int) -> int | None:
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[_START_FIELD])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError):  # another user's process, where /proc hides those
        return 0


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    try:
        return int((_PROCESSES / "self" / "statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


def set_low_priority(niceness: int) -> None:
    """Lower the priority of this process, where the system allows it."""
    if hasattr(os, "nice"):
        os.nice(niceness)


# Pipes, sockets and limits


def widen_pipe(pipe: IO[bytes], num_bytes: int) -> None:
    """Set the capacity of a pipe, on Linux. Has no effect if the system does not allow as much."""
    set_size = getattr(fcntl, "F_SETPIPE_SZ", None)
    if fcntl is not None and set_size is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, set_size, num_bytes)


def write_buffers(out: int, buffers: list[bytes | memoryview]) -> int:
    """Write `buffers` to a file descriptor in one system call, where there is one for that. Returns the number of
    bytes written, which may be fewer than there are.
    """
    if hasattr(os, "writev"):
        return os.writev(out, buffers)
    return os.write(out, buffers[0])


def unread_bytes(descriptor: int) -> int:
    """Return the number of bytes that can be read from a socket at once; 0 if the system does not report it."""
    if fcntl is None or termios is None:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0])
    except OSError:
        return 0


def listening_unix_sockets() -> list[Path]:
    """Return the paths of all Unix sockets that accept connections, of any user. Empty on other systems than Linux."""
    try:
        lines = _UNIX_SOCKETS.read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []
    entries = [line.split(maxsplit=_UNIX_PATH_FIELD) for line in lines]
    return [
        Path(entry[_UNIX_PATH_FIELD])
        for entry in entries
        if len(entry) > _UNIX_PATH_FIELD and entry[_UNIX_PATH_FIELD][0] == "/" and entry[3] == _UNIX_ACCEPTS
    ]


def limit_of_open_files(wanted: int) -> int | None:
    """Raise the limit on open files of this process to `wanted`, or as far as allowed. Returns the limit; None if
    there is none.
    """
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return None if soft == resource.RLIM_INFINITY else soft
