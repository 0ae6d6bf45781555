"""Endpoints `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM. An option of the engine enables
them.

Any client with the API key may use them, since this process has the operator role at the engine.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.http_connection import cancel_on_disconnect
from kvscope_engine.http.middleware import read_body
from kvscope_engine.http.schemas.api_errors import ApiError, refusal_error
from kvscope_engine.http.schemas.request_bodies import LoadAdapterBody, UnloadAdapterBody
from kvscope_telemetry.errors import EngineDead
from kvscope_telemetry.messages.commands import Failed, LoadAdapter, UnloadAdapter


async def load_adapter(request: Request) -> Response:
    api: Api = request.app.state.api
    body = await read_body(request, LoadAdapterBody, api.settings.limits)
    if body.lora_name == api.model_name:
        raise ApiError(400, f"{body.lora_name!r:.140} is not accepted: the model is called so", param="lora_name")
    await _execute(request, LoadAdapter(name=body.lora_name, path=body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")


async def unload_adapter(request: Request) -> Response:
    body = await read_body(request, UnloadAdapterBody, request.app.state.api.settings.limits)
    await _execute(request, UnloadAdapter(name=body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")


async def _execute(request: Request, command: LoadAdapter | UnloadAdapter) -> None:
    """Wait until the engine has executed `command` and its status is refreshed.

    Raises ApiError with the engine's reason if the engine refuses.
    """
    api: Api = request.app.state.api
    try:
        reply = await cancel_on_disconnect(request, api.engine_client.ask(command))
    except EngineDead as error:
        raise ApiError(503, str(error), code="engine_away") from error
    if isinstance(reply, Failed):
        is_served = api.engine_client.status is None or api.engine_client.status.takes_adapters
        raise refusal_error(reply.reason) if is_served else ApiError(404, reply.reason)
