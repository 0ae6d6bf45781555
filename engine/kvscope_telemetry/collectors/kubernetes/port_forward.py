"""Keeps a port of this machine forwarded to a pod: runs `kubectl port-forward`, and starts it again when it ends.

Owns the process and the thread that reads its output.
"""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Final

from kvscope_telemetry import operating_system
from kvscope_telemetry.collectors.kubernetes.kubectl import error_text

PAUSES_S: Final = (1.0, 30.0)
"""Pause in seconds after the first end of the process, and maximum pause. The pause doubles each time, until the
process forwarded for longer than the maximum.
"""
_READY: Final = b"Forwarding from"
_TROUBLE: Final = (b"error", b"lost connection")
"""Beginnings of messages, in any case, after which kubectl may run on without forwarding anything."""
_MAX_LINE_BYTES: Final = 4096
_END_S: Final = 2.0


class PortForward:
    """Forwards `local_port`, which is chosen once, until `close`.

    `command`: function that returns kubectl's command, given the local port.
    """

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        self.local_port = _free_port()
        self.failure = ""
        """Why kubectl last ended, in its words; empty before it first ended, and once it says that it forwards."""
        self._arguments = command(self.local_port)
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="kvscope-forward", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process and the thread. Idempotent."""
        self._end.set()
        with self._lock:
            process = self._process
        if process is not None:
            _stop(process)
        self._thread.join()

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while not self._end.is_set():
            if self._forward():
                pause_s = PAUSES_S[0]
            # Random, so that clients of a cluster that comes back do not all ask it at the same time.
            self._end.wait(pause_s * random.uniform(0.75, 1.0))
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def _forward(self) -> bool:
        """Run kubectl until it ends. Returns whether the port was forwarded for longer than the maximum pause: kubectl
        reports that it forwards before the pod answers.
        """
        started_s = time.monotonic()
        with self._lock:
            if self._end.is_set():
                return False
            try:
                process = self._process = subprocess.Popen(
                    self._arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    **operating_system.own_session(),
                )
            except OSError as error:
                self.failure = f"kubectl cannot be run: {error.strerror}"
                return False
        assert process.stdout is not None
        with process:
            was_ready, last = self._read(process.stdout)
            _stop(process)
        if not self._end.is_set():
            self.failure = f"kubectl: {error_text(last)}"
        return was_ready and time.monotonic() - started_s > PAUSES_S[1]

    def _read(self, output: IO[bytes]) -> tuple[bool, bytes]:
        """Read kubectl's output until it ends or reports trouble. Returns whether the port was forwarded, and the last
        line.
        """
        was_ready, last = False, b""
        while line := output.readline(_MAX_LINE_BYTES):
            if line.startswith(_READY):
                was_ready, self.failure = True, ""
            elif line.strip() and not line.startswith(b"Handling"):
                last = line
                if any(each in line.lower() for each in _TROUBLE):
                    break
        return was_ready, last


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started: a login plugin may keep its output open, which is read to its end."""
    with suppress(OSError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    operating_system.kill_session(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
