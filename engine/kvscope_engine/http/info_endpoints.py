"""Endpoints other than completions: models, health, version, tokenize and detokenize."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.http_connection import cancel_on_disconnect
from kvscope_engine.http.middleware import owner_of, read_body, slot_of
from kvscope_engine.http.request_prompts import chat_ids, text_ids
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import DetokenizeBody, TokenizeBody
from kvscope_engine.http.schemas.responses import Detokenized, Health, Model, ModelList, Root, Tokenized, Version
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import LoadedAdapter, Status
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.transport.client_sockets import NO_ENGINE

SILENT_S: Final = 30.0
"""Seconds since the last status after which the engine counts as stuck.

The status is queried every five seconds, and the engine answers on its I/O thread, independently of steps.
"""
STUCK_S: Final = 60.0
"""Duration of a step in seconds after which the engine counts as stuck."""
PAUSED_S: Final = 60.0
"""Duration of a pause in seconds after which the engine counts as not serving."""


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def root(request: Request) -> Response:
    return json_response(Root())


async def models(request: Request) -> Response:
    api: Api = request.app.state.api
    return json_response(ModelList(data=[_model(api), *(_adapter(api, one) for one in api.adapters.values())]))


async def model(request: Request) -> Response:
    api: Api = request.app.state.api
    adapter = await api.adapter_of(request.path_params["name"])
    return json_response(_adapter(api, api.adapters[adapter]) if adapter else _model(api))


async def health(request: Request) -> Response:
    """Handle `GET /health`: 200 while the engine serves, else 503 with the reason.

    The reply does not name the model, because no API key is required.
    """
    client = request.app.state.api.engine_client
    status = client.status
    if status is None:
        raise ApiError(503, client.refusal or NO_ENGINE, code="engine_away")
    if reason := why_not_served(status, time.monotonic() - client.status_received_s):
        raise ApiError(503, reason, code="engine_away")
    return json_response(Health("paused" if status.paused else "ready"))


def why_not_served(status: Status, silent_s: float) -> str:
    """Return why the engine does not serve properly; "" if it does.

    `silent_s`: seconds since its last status was received.
    """
    if status.phase == "loading":
        progress = status.progress
        percent = f" ({progress.done / progress.total:.0%})" if progress is not None and progress.total else ""
        return f"the engine is loading: {progress.stage}{percent}" if progress is not None else "the engine is loading"
    if status.phase != "ready":
        return "the engine has ended"
    if silent_s > SILENT_S:
        return f"the engine is stuck: no telemetry for {silent_s:.0f} s"
    if status.busy_s > STUCK_S:
        return f"the engine is stuck: its current step has taken {status.busy_s:.0f} s so far"
    if status.paused_s > PAUSED_S:
        return f"the engine has been paused by {status.paused_by or 'a client'} for {status.paused_s:.0f} s"
    return ""


async def version(request: Request) -> Response:
    status = request.app.state.api.engine_client.status
    hello = status.hello if status is not None else None
    return json_response(Version(program_version(), hello.engine_version if hello is not None else ""))


async def tokenize(request: Request) -> Response:
    api: Api = request.app.state.api
    body = await read_body(request, TokenizeBody, api.settings.limits)
    await api.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages is accepted", param="prompt")
    tokenizer = await _tokenizer(api)
    max_len = api.hello.model.max_model_len
    slot = slot_of(request)
    owner = owner_of(request)
    ids = await cancel_on_disconnect(
        request, api.tokenizer_threads.run(owner, slot.body_bytes, lambda: _ids(tokenizer, body, max_len))
    )
    slot.release_body()
    texts: list[str] | None = None
    if body.return_token_strs:
        texts = await api.tokenizer_threads.run(owner, 8 * len(ids), lambda: list(map(tokenizer.token_text, ids)))
    return json_response(Tokenized(count=len(ids), max_model_len=api.max_model_len, tokens=ids, token_strs=texts))


async def detokenize(request: Request) -> Response:
    api: Api = request.app.state.api
    body = await read_body(request, DetokenizeBody, api.settings.limits)
    await api.adapter_of(body.model)
    tokenizer = await _tokenizer(api)
    vocab_size, max_len = api.hello.model.vocab_size, api.hello.model.max_model_len
    if len(body.tokens) > max_len > 0:
        raise ApiError(400, f"{len(body.tokens)} tokens are not accepted: at most {max_len}", param="tokens")
    if body.tokens and max(body.tokens) >= vocab_size:
        raise ApiError(
            400, f"token id {max(body.tokens)} is not accepted: must be 0 to {vocab_size - 1}", param="tokens"
        )
    return json_response(Detokenized(await _text_of(api, request, tokenizer, body.tokens)))


async def _text_of(api: Api, request: Request, tokenizer: Tokenizer, tokens: list[int]) -> str:
    return await api.tokenizer_threads.run(owner_of(request), 8 * len(tokens), lambda: tokenizer.decode(tokens))


async def _tokenizer(api: Api) -> Tokenizer:
    tokenizer = await api.tokenizer_threads.tokenizer(api.hello.model)
    if tokenizer is None:
        raise ApiError(400, f"text is not accepted: {api.tokenizer_threads.reason}")
    return tokenizer


def _ids(tokenizer: Tokenizer, body: TokenizeBody, max_len: int) -> list[int]:
    if body.prompt is not None:
        return text_ids(tokenizer, body.prompt, max_len, add_special_tokens=body.add_special_tokens)
    generates = body.add_generation_prompt
    return chat_ids(tokenizer, body.messages or (), body.tools or (), max_len=max_len, add_generation_prompt=generates)


def _model(api: Api) -> Model:
    info = api.hello.model
    return Model(id=api.model_name, created=api.started_s, root=info.name, max_model_len=api.max_model_len or None)


def _adapter(api: Api, adapter: LoadedAdapter) -> Model:
    return Model(id=adapter.name, created=api.started_s, root=adapter.path, parent=api.model_name)
