"""The process: a listening socket, uvicorn on it, and an orderly end.

SIGTERM and SIGINT let requests under way finish for a while and take no more; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn
from starlette.routing import BaseRoute

from kvscope_engine.http.api import HttpLimits, HttpSettings, api_keys
from kvscope_engine.http.app import make_app
from kvscope_engine.http.listening import is_loopback
from kvscope_engine.http.protocol import MAX_HEAD_BYTES, bounded
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.sockets.file_limit import raise_file_limit

BACKLOG: Final = 4096
OWN_FILES: Final = 256
"""Descriptors that are not clients' connections."""


class HttpServer:
    """Serves on `listener`. Raises BadInput for one beyond loopback without an API key, and as `make_app` does."""

    def __init__(self, settings: HttpSettings, listener: socket.socket, mounts: Sequence[BaseRoute] = ()) -> None:
        if not api_keys(settings.api_key) and not is_loopback(listener):
            raise BadInput(f"--listen on {listener.getsockname()[0]} is not accepted without an API key (--api-key)")
        raise_file_limit()
        limits = settings.limits
        self.app = make_app(settings, mounts)
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                self.app,
                http=bounded(limits, max_connections(limits)),
                ws="none",
                lifespan="on",
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # `--trust-forwarded` alone says whether they are believed
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=int(limits.keep_alive_s),
                timeout_graceful_shutdown=int(limits.drain_s),
            )
        )

    def run(self) -> None:
        """Until `stop`, or a signal where this is the main thread."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """End soon, from any thread."""
        self._server.should_exit = True


def max_connections(limits: HttpLimits) -> int:
    """As many as `limits` has, or the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, soft - OWN_FILES))


class _Server(uvicorn.Server):
    """Ends with no signal of its own: what ended it is known to whoever sent it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            with suppress(ValueError, RuntimeError):  # not in the main thread: a test's
                loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                with suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)
