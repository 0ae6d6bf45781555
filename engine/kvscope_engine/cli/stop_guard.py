"""A process that ends an engine whose stop takes too long. Run as a script; imports nothing of ours, nor of others.

In Python a signal's handler waits for the main thread to come back from whatever it computes, and a thread for the
interpreter's lock: neither can promise an end. The kernel's side of a signal writes its number into a pipe at once
(`signal.set_wakeup_fd`), and who reads it here is not the engine.
"""

import contextlib
import os
import select
import signal
import sys
import time


def main(descriptor: int, limit_s: float) -> None:
    """Until the engine has ended by itself, or `limit_s` after it was asked to."""
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
    """All that this process started is gone, as it is about to be itself; the process that guards it, too."""
    _kill(_descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    """Of all its threads, their own behind them; but this process."""
    found = _children(pid)
    return found + [one for child in found for one in _descendants(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return [child for child in found if child != os.getpid()]


def _kill(pids: list[int]) -> None:
    """With its group where it leads one: a compiler's driver starts compilers."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            leads = os.getpgid(pid) == pid
            (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
