"""Busy neighbours: processes that do nothing but use a core each, and never outlive what they are beside.

The kernel ends them with the thread that started them, and a clock after `MAX_LIFE_S` at the latest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_LIFE_S: Final = 300
_PROGRAM: Final = """
import ctypes, os, resource, signal, sys
nice, life_s, parent = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.alarm(life_s)
resource.setrlimit(resource.RLIMIT_CPU, (life_s, life_s))
if os.getppid() != parent:
    sys.exit("the parent has ended")
os.nice(nice)
print("busy", flush=True)
while True:
    pass
"""


@contextmanager
def busy_processes(count: int, nice: int, *, own_session: bool = False) -> Iterator[tuple[int, ...]]:
    """`count` processes that are busy, `nice` steps below this one's priority, until the context ends; their ids.

    `own_session`: each is in a session of its own, as a program from another terminal is. Where the kernel groups by
    session (autogroup) their priority then means nothing beside this process.
    """
    processes = [_start(nice, own_session) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None, "a neighbour's output is a pipe"
            process.stdout.readline()
        yield tuple(process.pid for process in processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def _start(nice: int, own_session: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", _PROGRAM, *map(str, (nice, MAX_LIFE_S, os.getpid()))]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=own_session)
