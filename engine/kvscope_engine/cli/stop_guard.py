"""Separate process that kills an engine whose stop takes too long.

Run as a script; imports only the standard library.

In Python, a signal handler waits until the main thread returns to the interpreter, and a thread waits for the
interpreter's lock, so neither can guarantee an end. The kernel-level part of a signal writes its number to a pipe
immediately (`signal.set_wakeup_fd`), and this process reads it.
"""

import contextlib
import os
import select
import signal
import sys
import time


def main(descriptor: int, limit_s: float) -> None:
    """Wait until the engine has ended, or kill it `limit_s` seconds after it received a signal.

    `descriptor`: read end of a pipe to which signal numbers are written.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    engine = os.getppid()
    while not {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(data := os.read(descriptor, 64)):
        if not data:
            return
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left_s)[0] and not os.read(descriptor, 64):
            return
    children = _descendants(engine)
    if os.getppid() == engine:
        sys.stderr.write(f"kvscope-engine: did not stop within {limit_s:g} s and was killed\n")
        sys.stderr.flush()
        os.kill(engine, signal.SIGKILL)
        _kill(children)


def kill_children() -> None:
    """Kill all descendants of this process, including its guard, because this process is about to exit."""
    _kill(_descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    """Return the descendants of process `pid`, parents before children, without this process. Children that any
    thread of a process started are included.
    """
    children = _children(pid)
    return children + [one for child in children for one in _descendants(child)]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    except OSError:
        pass
    return [child for child in children if child != os.getpid()]


def _kill(pids: list[int]) -> None:
    """Kill the processes `pids`. If one leads a process group, kill the group, because a compiler driver starts
    compilers.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            is_group_leader = os.getpgid(pid) == pid
            (os.killpg if is_group_leader else os.kill)(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
