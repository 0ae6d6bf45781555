"""The API as a child of an engine's process: bound before the model loads, started with the sockets, ended with them.

Owns the child's life. The engine goes on when the child ends, and says that it did. Imports no server.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvscope_engine.http.http_command import API_KEY_VARIABLE
from kvscope_engine.http.listening import is_loopback, listen, url
from kvscope_telemetry.errors import BadInput

GRACE_S: Final = 5.0
"""From SIGTERM until it is killed: the engine has ended its requests before."""


class HttpChild:
    """Bound at `address` from here on. Raises BadInput and KvscopeError for one that cannot be."""

    def __init__(self, address: str, *, api_key: str, options: Sequence[str], tell: Callable[[str], None]) -> None:
        self._listener = listen(address)
        self.url = url(self._listener)
        """Without a path."""
        self._api_key = api_key
        self._options = options
        self._tell = tell
        self._is_ending = False
        if not api_key and not is_loopback(self._listener):
            self._listener.close()
            raise BadInput(f"--http {address} is not accepted without an API key: beyond loopback --api-key is needed")

    def close(self) -> None:
        """Of one that never ran."""
        self._listener.close()

    @contextmanager
    def running(self, endpoint: str, key: Path) -> Iterator[None]:
        """While the engine serves on `endpoint`; `key` lets an operator in there."""
        with self._listener:
            child = self._start(endpoint, key)
        print(f"OpenAI API on {self.url}/v1", flush=True)
        watch = threading.Thread(target=self._watch, args=(child,), name="kvscope-http-watch", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._is_ending = True
            _end(child)
            watch.join()

    def _start(self, endpoint: str, key: Path) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        words = [sys.executable, "-m", "kvscope_engine.cli.main", "http", endpoint, "--listen-fd", str(descriptor)]
        words += ["--exit-with-parent", str(os.getpid()), "--key", str(key), *self._options]
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        if self._api_key:
            environment[API_KEY_VARIABLE] = self._api_key
        return subprocess.Popen(words, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if not self._is_ending:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            self._tell(f"the OpenAI API on {self.url} {how}: the engine goes on without it")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()


def connectable(endpoint: str) -> str:
    """Where a process of this machine reaches an engine that listens on `endpoint`."""
    for anywhere, here in (("tcp://0.0.0.0:", "tcp://127.0.0.1:"), ("tcp://*:", "tcp://127.0.0.1:")):
        if endpoint.startswith(anywhere):
            return here + endpoint.removeprefix(anywhere)
    return endpoint.replace("tcp://[::]:", "tcp://[::1]:", 1)
