"""Runs the OpenAI API as a child of an engine's process, bound before the model loads.

Owns the child process and the listening socket. A child that dies is restarted on the same socket, where new
connections wait meanwhile. If it keeps dying, the engine is stopped, because a server without its API is useless.
Imports no server code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvscope_engine.http.http_command import API_KEY_VARIABLE
from kvscope_engine.http.listen_address import is_loopback, listen, listener_url
from kvscope_telemetry.errors import BadInput, KvscopeError

KILL_DELAY_S: Final = 5.0
"""Seconds from SIGTERM to SIGKILL of the child. The engine has ended its requests before SIGTERM."""
MAX_RESTARTS: Final = 5
"""Maximum number of consecutive restarts. The pause before a restart doubles each time, from `FIRST_PAUSE_S`."""
FIRST_PAUSE_S: Final = 0.5
RESET_UPTIME_S: Final = 60.0
"""Seconds of uptime after which a child's restarts are counted from zero again."""
_BAD_INPUT: Final = BadInput.exit_code
"""Exit status of a child that refused its options, which a restart would not change."""


class HttpChild:
    """Listening socket, bound on construction, and the child process that serves it.

    Raises BadInput for a bad address or a missing API key, KvscopeError if the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str,
        options: Sequence[str],
        report: Callable[[str], None],
        stop_engine: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        self._listener = listen(address)
        self.url = listener_url(self._listener)
        """Base URL of the server, without a path."""
        self._api_key = api_key
        self._options = options
        self._report, self._stop_engine = report, stop_engine
        self._is_ending = threading.Event()
        self._lock = threading.Lock()  # a child is not started while another is being ended
        self._failure = ""
        if not api_key and not is_loopback(self._listener):
            self._listener.close()
            raise BadInput(f"--http {address} is not accepted without an API key: beyond loopback --api-key is needed")

    def close(self) -> None:
        """Close the listening socket. Needed only if `running` was not entered."""
        self._listener.close()

    @contextmanager
    def running(self, endpoint: str, key: Path) -> Iterator[None]:
        """Serve the API inside the context. `endpoint` is the engine's endpoint; `key` is the file with an operator key
        for it.

        Raises KvscopeError on exit if the API process kept dying.
        """
        with self._listener:
            self._child = self._start(endpoint, key)
            print(f"OpenAI API on {self.url}/v1", flush=True)
            watch = threading.Thread(target=self._watch, args=(endpoint, key), name="kvscope-http-watch", daemon=True)
            watch.start()
            try:
                yield
            finally:
                self._is_ending.set()
                self._listener.close()
                with self._lock:
                    _terminate(self._child)
                watch.join()
        if self._failure:
            raise KvscopeError(self._failure)

    def _start(self, endpoint: str, key: Path) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "kvscope_engine.cli.main", "http", endpoint, "--listen-fd", str(descriptor)]
        command += ["--exit-with-parent", str(os.getpid()), "--key", str(key), *self._options]
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        if self._api_key:
            environment[API_KEY_VARIABLE] = self._api_key
        return subprocess.Popen(command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL)

    def _watch(self, endpoint: str, key: Path) -> None:
        num_restarts = 0
        while True:
            started_s = time.monotonic()
            code = self._child.wait()
            if self._is_ending.is_set():
                return
            num_restarts = 1 if time.monotonic() - started_s >= RESET_UPTIME_S else num_restarts + 1
            outcome = f"the OpenAI API on {self.url} " + (
                f"was killed by signal {-code}" if code < 0 else f"ended: {code}"
            )
            if code == _BAD_INPUT or num_restarts > MAX_RESTARTS:
                self._failure = f"{outcome}; it was restarted {num_restarts - 1} times"
                self._stop_engine()
                return
            pause_s = FIRST_PAUSE_S * 2 ** (num_restarts - 1)
            self._report(f"{outcome}; restarting it in {pause_s:g} s")
            if self._is_ending.wait(pause_s):
                return
            with self._lock:
                if self._is_ending.is_set():
                    return
                self._child = self._start(endpoint, key)


def _terminate(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(KILL_DELAY_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()


def local_endpoint(endpoint: str) -> str:
    """Return the address at which a process on this machine reaches an engine that listens on `endpoint`."""
    for wildcard, loopback in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://*:", "tcp://127.0.0.1:")):
        if endpoint.startswith(wildcard):
            return loopback + endpoint.removeprefix(wildcard)
    return endpoint.replace("tcp://[::]:", "tcp://[::1]:", 1)
