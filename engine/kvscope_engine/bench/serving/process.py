"""A server as a process of its own: started, waited for, and ended with whatever it started, however we end.

Owns the process and the file of what it says. It is the first of a group of its own, so that Ctrl-C reaches us alone
and we end it; the kernel ends it where we are killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.foreign.address import ForeignAddress
from kvscope_telemetry.foreign.http_get import HttpGet, NoAnswer
from kvscope_telemetry.foreign.prompting.served_model import MODELS

GRACE_S: Final = 10.0
"""From SIGTERM until it is killed."""
_LOOK_S: Final = 0.2
_PORTS: Final = range(15_000, 32_000)
"""Below those that Linux gives to outgoing connections."""
_MAX_SAID: Final = 64 << 10
_LAUNCHER: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which lasts through exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Server:
    """A process that runs, and the descriptor of what it says."""

    def __init__(self, child: subprocess.Popen[bytes], said: int) -> None:
        self.pid = child.pid
        self._child, self._said = child, said

    def check(self, name: str, when: str) -> None:
        """Raise KvscopeError where it has ended."""
        if (code := self._child.poll()) is not None:
            raise KvscopeError(f"{name} ended with {code} {when}: {_last_line(self._said) or 'it printed nothing'}")


def free_port() -> int:
    """One of loopback that nobody has now, of those that the system gives to nobody who does not ask for it by number:
    the server that gets it binds it later."""
    ports = random.sample(_PORTS, 64)
    for port in [*ports, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise KvscopeError("no port of 127.0.0.1 is free")


@contextmanager
def process(command: Sequence[str]) -> Iterator[Server]:
    """Run `command` until the context ends."""
    words = [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    with tempfile.TemporaryFile(prefix="kvscope-bench-") as said:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        )
        try:
            yield Server(child, said.fileno())
        finally:
            _end(child)


def wait_ready(server: Server, name: str, address: ForeignAddress, timeout_s: float) -> None:
    """Until it tells its models. Raises KvscopeError for one that ends before, or takes too long."""
    deadline_s = time.monotonic() + timeout_s
    http = HttpGet(address)
    while True:
        server.check(name, "before it served")
        try:
            http.get(MODELS)
            return
        except NoAnswer as error:
            why = str(error)
        if time.monotonic() > deadline_s:
            raise KvscopeError(f"{name} does not serve after {timeout_s:g} s: {why}")
        time.sleep(_LOOK_S)


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, _MAX_SAID, max(0, size - _MAX_SAID))
    lines = data.decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _end(child: subprocess.Popen[bytes]) -> None:
    """It, and all of its group."""
    _signal(child.pid, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C ends the patience, and nothing else
        _signal(child.pid, signal.SIGKILL)
        child.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
