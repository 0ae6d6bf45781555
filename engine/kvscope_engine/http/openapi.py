"""Endpoint `GET /openapi.json`: the API's specification, generated from the structs of request and response bodies."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.schemas.api_errors import ErrorBody
from kvscope_engine.http.schemas.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from kvscope_engine.http.schemas.responses import (
    ChatCompletion,
    CompletionResponse,
    Detokenized,
    Document,
    Health,
    Model,
    ModelList,
    Root,
    Tokenized,
    Version,
)
from kvscope_engine.http.schemas.responses_api import ResponseObject, ResponsesBody
from kvscope_telemetry.program_version import program_version

REF_TEMPLATE: Final = "#/components/schemas/{name}"
POST_ENDPOINTS: Final[dict[str, tuple[type, type, str]]] = {
    "/v1/completions": (CompletionBody, CompletionResponse, "Continue prompts"),
    "/v1/chat/completions": (ChatBody, ChatCompletion, "Answer a conversation"),
    "/v1/responses": (ResponsesBody, ResponseObject, "Answer a conversation, as items"),
    "/v1/load_lora_adapter": (LoadAdapterBody, str, "Load a LoRA adapter"),
    "/v1/unload_lora_adapter": (UnloadAdapterBody, str, "Unload a LoRA adapter"),
    "/tokenize": (TokenizeBody, Tokenized, "Tokens of a text or a conversation"),
    "/detokenize": (DetokenizeBody, Detokenized, "Text of tokens"),
}
GET_ENDPOINTS: Final[dict[str, tuple[type, str]]] = {
    "/": (Root, "Whether a server answers"),
    "/v1/models": (ModelList, "The model that is served, and its LoRA adapters"),
    "/v1/models/{name}": (Model, "The model, or adapter, of this name"),
    "/health": (Health, "Whether the engine serves"),
    "/version": (Version, "Which version this is"),
}
ERROR_DESCRIPTIONS: Final = {
    "400": "The request is invalid, or asks for something unsupported",
    "401": "No valid API key",
    "403": "Without an API key, the Host header must be an IP address or localhost",
    "404": "No such model or page",
    "405": "No such method",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests or bodies at a time: try again later",
    "503": "The engine is not running or still loading: try again later",
}


async def openapi(request: Request) -> Response:
    return Response(_encoded(), media_type="application/json")


@cache
def document() -> Document:
    kinds = [
        ErrorBody,
        *(kind for post in POST_ENDPOINTS.values() for kind in post[:2]),
        *(get[0] for get in GET_ENDPOINTS.values()),
    ]
    _, schemas = msgspec.json.schema_components([kind for kind in kinds if kind is not str], ref_template=REF_TEMPLATE)
    paths: dict[str, Any] = {path: {"post": _post(*post)} for path, post in POST_ENDPOINTS.items()}
    paths |= {path: {"get": _get(path, *get)} for path, get in GET_ENDPOINTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvscope", "version": program_version(), "description": "OpenAI's API, for a kvscope engine"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def _post(body: type, answer: type, summary: str) -> dict[str, Any]:
    operation = _operation(answer, summary)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    if "stream" in body.__annotations__ or "stream" in getattr(body, "__struct_fields__", ()):
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


def _get(path: str, answer: type, summary: str) -> dict[str, Any]:
    operation = _operation(answer, summary)
    if "{name}" in path:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    return operation


def _operation(answer: type, summary: str) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not str:
        content = {"application/json": {"schema": _ref(answer)}}
    good = {"description": summary, "content": content}
    bad = {"application/json": {"schema": _ref(ErrorBody)}}
    errors = {status: {"description": text, "content": bad} for status, text in ERROR_DESCRIPTIONS.items()}
    return {"summary": summary, "responses": {"200": good} | errors}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF_TEMPLATE.format(name=kind.__name__)}
