"""The application: which path is whose, how errors are told, and the life of what all of them share.

Pages of other rooms are mounted here (`mounts`): each is a route of its own, behind the same gate.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvscope_engine.http.api import Api, HttpSettings
from kvscope_engine.http.chat import chat
from kvscope_engine.http.completions import completions
from kvscope_engine.http.gate import Gate
from kvscope_engine.http.openapi import openapi
from kvscope_engine.http.pages import detokenize, health, model, models, tokenize, version
from kvscope_engine.http.shapes.errors import ApiError, error_response


def make_app(settings: HttpSettings, mounts: Sequence[BaseRoute] = ()) -> Starlette:
    """The application for one engine. Raises BadInput for an endpoint or key that is not accepted."""
    api = Api(settings)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        api.line.start()
        try:
            yield
        finally:
            api.line.close()
            api.text.close()

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
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
            Middleware(
                Gate,
                api_key=settings.api_key,
                limits=settings.limits,
                open_paths=settings.open_paths,
                trust_forwarded=settings.trust_forwarded,
            )
        ],
        exception_handlers={ApiError: _told, HTTPException: _no_such_page, Exception: _broken},
        lifespan=life,
    )
    app.router.redirect_slashes = False
    app.state.api = api
    return app


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for these"
    closes = {"Connection": "close"} if error.status in (408, 413, 415, 499) else {}  # the rest of a body is not read
    return error_response(error, closes)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path = f"{request.method} {request.url.path}"
    message = f"{path:.200} is not served" if error.status_code in (404, 405) else error.detail
    return error_response(ApiError(error.status_code, message), dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    """A mistake of ours: told to the client in a line, and whole on standard error."""
    traceback.print_exception(error, file=sys.stderr)
    return error_response(ApiError(500, f"the server failed on this request: {type(error).__name__}"))
