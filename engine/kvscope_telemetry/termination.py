"""Signals that end a program in an orderly way: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal was closed).

Every command handles these signals through this module, so that recordings are completed, sockets removed and layouts
saved in each case. Imports no other kvscope module, so that signals are also handled while the other modules are
imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGHUP = getattr(signal, "SIGHUP", None)  # None on Windows
END_SIGNALS = (signal.SIGINT, signal.SIGTERM) if SIGHUP is None else (signal.SIGINT, signal.SIGTERM, SIGHUP)
INTERRUPTED = 130
"""Exit code after SIGINT. After another signal, the exit code is 128 plus the signal's number, as in a shell."""

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def handling_signals(handler: Handler, numbers: Iterable[signal.Signals] = END_SIGNALS) -> Iterator[None]:
    """Call `handler` for each of the signals `numbers` inside the context, and restore the earlier handlers afterwards.

    Does nothing outside the main thread. An ignored SIGHUP stays ignored, as `nohup` requests. After the first SIGHUP,
    further ones are ignored, because a closed terminal may cause two: its own and its shell's.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, _Installed(handler)) for each in numbers if is_main and not _is_ignored(each)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if not _is_ignored(number):
                signal.signal(number, earlier)


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit inside the context, so that every `finally` clause runs. Python
    itself raises KeyboardInterrupt for SIGINT.
    """
    with handling_signals(_exit, END_SIGNALS[1:]):
        yield


@contextmanager
def leaving_while_importing(program: str, first: Callable[[], object] | None = None) -> Iterator[None]:
    """At a signal, print one line, call `first` and end the process. A second signal kills the process immediately.

    Raises nothing: imports turn an exception from a signal handler into other errors, or lose it. Signals with a
    handler other than Python's or this module's are left alone.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if number != SIGHUP:  # a closed terminal may cause two
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{program}: interrupted\n")
            sys.stderr.flush()
        try:
            if first is not None:
                first()
        finally:
            os._exit(128 + number)

    with handling_signals(leave, filter(_is_default, END_SIGNALS)):
        yield


class _Installed:
    """Signal handler of this module. `leaving_while_importing` recognizes it by its type."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == SIGHUP:
            signal.signal(number, signal.SIG_IGN)
            _replace_dead_terminal()
        self.handler(number, frame)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _is_ignored(number: signal.Signals) -> bool:
    return number == SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _is_default(number: signal.Signals) -> bool:
    current = signal.getsignal(number)
    ours = isinstance(current, _Installed) and current.handler is _exit
    return ours or current in (signal.SIG_DFL, signal.default_int_handler)


def _replace_dead_terminal() -> None:
    """Redirect output to a closed terminal to /dev/null: each write to the terminal would raise OSError."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
