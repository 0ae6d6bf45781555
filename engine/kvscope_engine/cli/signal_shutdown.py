"""Ends a service on a signal (`termination.END_SIGNALS`): orderly if possible, and always within a time limit.

A stop has three stages. Immediately, the service is requested to stop, and loading is interrupted. After most of the
limit, a thread closes the recording and exits. At the limit, a separate process (`stop_guard`) kills this process,
whatever it is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from kvscope_engine.cli import stop_guard
from kvscope_engine.cli.notices import print_notices
from kvscope_engine.server.service import EngineService, Interrupted
from kvscope_telemetry.termination import handling_signals

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.engine_recorder import EngineRecorder

STOP_S: Final = 10.0
PR_SET_CHILD_SUBREAPER: Final = 36
FORCED_EXIT_SHARE: Final = 0.8
"""Fraction of the time limit after which the process only closes the recording and exits."""


class Stopping:
    """Signal handler with references to the objects that it stops. The references are set when the objects are
    created.
    """

    def __init__(self, limit_s: float) -> None:
        self.was_loading = False
        self._service: EngineService | None = None
        self._recorder: EngineRecorder | None = None
        self._limit_s = limit_s
        self._is_requested = False

    def set_recorder(self, recorder: EngineRecorder | None) -> None:
        self._recorder = recorder

    def set_service(self, service: EngineService) -> None:
        self._service = service

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._is_requested:
            self._is_requested = True
            last_resort = threading.Timer(self._limit_s * FORCED_EXIT_SHARE, self._force_exit)
            last_resort.daemon = True
            with contextlib.suppress(RuntimeError):  # no memory for a thread: `stop_guard` ends the process later
                last_resort.start()
        if self._service is not None:
            self._service.stop()
        if self._service is None or self._service.is_loading:
            self.was_loading = True
            raise Interrupted

    def _force_exit(self) -> None:
        if self._recorder is not None:
            with contextlib.suppress(Exception):  # as far as possible
                self._recorder.close()
        print_notices([f"it did not stop within {self._limit_s * FORCED_EXIT_SHARE:g} s and was ended"])
        stop_guard.kill_children()
        os._exit(1)


@contextmanager
def stopped_by_signals(limit_s: float) -> Iterator[Stopping]:
    """Return a context that ends within `limit_s` seconds of a signal.

    While the model loads, the signal handler raises `Interrupted`, which is suppressed after it has left the context's
    body. Later, it stops the service after the current step, and the body is expected to return then.
    """
    stopping = Stopping(limit_s)
    _adopt_orphans()
    with handling_signals(stopping.request_stop):
        try:
            with contextlib.suppress(Interrupted), _guarded(limit_s):
                yield stopping
        finally:
            if stopping.was_loading:
                stop_guard.kill_children()  # including one that was being started when the signal came


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, such as the compilers of a killed build tool."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def _guarded(limit_s: float) -> Iterator[None]:
    """Return a context with a process (`stop_guard`) that kills this process unless the context is left within
    `limit_s` seconds of a signal.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    command = [sys.executable, "-I", "-S", stop_guard.__file__, str(read_fd), str(limit_s)]
    try:
        guard = subprocess.Popen(command, pass_fds=[read_fd], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        # Python's low-level handler writes the number of each signal to the pipe when it arrives, even while the main
        # thread is busy in C code and runs no handler.
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            os.close(write_fd)
            guard.wait()
    finally:
        # Open until here: were the guard killed and this the only reader, Python would print a BrokenPipeError for
        # each signal.
        os.close(read_fd)
