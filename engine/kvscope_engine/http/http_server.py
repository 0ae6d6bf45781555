"""The HTTP server's process: a listening socket, uvicorn, and an orderly shutdown.

SIGTERM, SIGINT and SIGHUP let running requests finish for a while and refuse new ones; a second Ctrl-C ends the process
immediately.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvscope_engine.http.adapter_endpoints import load_adapter, unload_adapter
from kvscope_engine.http.api_state import Api, HttpLimits, HttpSettings, api_keys
from kvscope_engine.http.completions import chat, completions
from kvscope_engine.http.http_connection import MAX_HEAD_BYTES, bounded_connection_class
from kvscope_engine.http.info_endpoints import detokenize, health, model, models, root, tokenize, version
from kvscope_engine.http.listen_address import is_loopback
from kvscope_engine.http.middleware import AccessMiddleware
from kvscope_engine.http.openapi import openapi
from kvscope_engine.http.responses_endpoint import responses
from kvscope_engine.http.schemas.api_errors import ApiError, error_response
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.metrics.metrics_page import PATH, MetricsPage
from kvscope_telemetry.termination import handling_signals
from kvscope_telemetry.transport.file_limit import raise_file_limit

BACKLOG: Final = 4096
OWN_FILES: Final = 256
"""Number of file descriptors reserved for purposes other than clients' connections."""


class HttpServer:
    """Serves the API on `listener`.

    Raises BadInput for an address beyond loopback without an API key, and for an engine endpoint or key file that is
    not accepted.
    """

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
                http=bounded_connection_class(limits, max_connections(limits)),
                ws="none",
                lifespan="on",
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # X-Forwarded-For is trusted only with `--trust-forwarded`
                backlog=BACKLOG,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=int(limits.keep_alive_s),
                timeout_graceful_shutdown=int(limits.drain_s),
            )
        )

    def run(self) -> None:
        """Serve until `stop` is called. On the main thread, a signal also ends serving."""
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Request an orderly shutdown. Thread-safe."""
        self._server.should_exit = True


def max_connections(limits: HttpLimits) -> int:
    """Return the limit on connections, reduced to the number of files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, soft - OWN_FILES))


class _Server(uvicorn.Server):
    """uvicorn server that does not re-raise the signal that ended it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handling_signals(self.handle_exit):
            yield


def metrics_route(page: MetricsPage) -> Route:
    """Return the route of the metrics page. Starlette runs its endpoint in a thread, because it is not a coroutine."""

    def answer(request: Request) -> Response:
        body, content_type = page.render(",".join(request.headers.getlist("accept")))
        return Response(body, headers={"Content-Type": content_type})

    return Route(PATH, answer, methods=["GET"])


def make_app(settings: HttpSettings, mounts: Sequence[BaseRoute] = ()) -> Starlette:
    """Create the application for one engine: routes, error handlers, and the lifetime of the shared state.

    `mounts` are routes of other packages, behind the same middleware. Raises BadInput for an endpoint or key that is
    not accepted.
    """
    api = Api(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.engine_client.start()
        try:
            yield
        finally:
            api.engine_client.close()
            api.tokenizer_threads.close()

    routes = [
        Route("/", root, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        *mounts,
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            *cors(settings),
            Middleware(
                AccessMiddleware,
                api_key=settings.api_key,
                limits=settings.limits,
                open_paths=settings.open_paths,
                trust_forwarded=settings.trust_forwarded,
            ),
        ],
        exception_handlers={ApiError: _error_answer, HTTPException: _http_error, Exception: _internal_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.api = api
    return app


def cors(settings: HttpSettings) -> list[Middleware]:
    """Return the middleware that lets web pages of `allowed_origins` use the API, or an empty list if there are no such
    origins.

    It answers preflight requests itself, which browsers send without an API key.
    """
    if not settings.allowed_origins:
        return []
    return [
        Middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    ]


async def _error_answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for these"
    headers = {"Connection": "close"} if error.status in (408, 413, 415, 499) else {}  # the rest of a body is not read
    return error_response(error, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path = f"{request.method} {request.url.path}"
    message = f"{path:.200} is not served" if error.status_code in (404, 405) else error.detail
    return error_response(ApiError(error.status_code, message), dict(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return error_response(ApiError(500, f"the server failed on this request: {type(error).__name__}"))
