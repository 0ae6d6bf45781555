"""State shared by all endpoints: the engine client, the model's tokenizer, limits, and the served model names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from kvscope_engine.http.engine_client import EngineClient
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.tokenizer_threads import TokenizerThreads
from kvscope_engine.server.service_limits import ServiceLimits
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.transport.client_sockets import NO_ENGINE

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    max_connections: int = 16_384
    """Maximum number of open connections, active or idle. Lowered to the process's limit on open files; further
    connections get HTTP status 503.
    """
    max_requests: int = 1024
    """Maximum number of requests in progress. Clients with few requests may use an additional eighth of this number."""
    max_choices: int = ServiceLimits().client_requests.count
    """Maximum number of choices in progress per client (each prompt has `n` choices). The default is the engine's
    limit.
    """
    max_body_bytes: int = 16 * MIB
    max_bodies_bytes: int = 256 * MIB
    """Maximum bytes of all request bodies that are not completely read or not tokenized yet. One client may use half of
    it.
    """
    header_s: float = 15.0
    """Maximum seconds to receive a request's headers, counted from the connection or the request's first byte."""
    chunk_s: float = 10.0
    body_s: float = 120.0
    write_s: float = 60.0
    """Maximum seconds for which a client may read nothing while its send buffer is full."""
    keep_alive_s: float = 75.0
    drain_s: float = 30.0
    """Maximum seconds to complete the requests in progress at shutdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    endpoint: str
    key: Path | None = None
    api_key: str = field(default="", repr=False)
    """Accepted keys, separated by commas. If empty, no key is required."""
    trust_forwarded: bool = False
    """Whether clients are identified by the last address of `X-Forwarded-For`. Safe only behind a proxy that sets this
    header.
    """
    served_name: str = ""
    """Model name shown to clients; empty for the engine's name."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; None if it should be located by the model's name."""
    tool_call_parser: str = ""
    """Format in which the model writes tool calls. If empty, it is detected from the chat template."""
    limits: HttpLimits = HttpLimits()
    open_paths: frozenset[str] = frozenset()
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the API (CORS), or `*` for all. If empty, CORS is disabled."""


def api_keys(text: str) -> list[str]:
    """Split `text` at commas. Raises BadInput if a key is empty."""
    keys = [key.strip() for key in text.split(",")] if text else []
    if not all(keys):
        raise BadInput("an empty API key is not accepted: KEY, or KEY,KEY for several")
    return keys


class Api:
    """State of the process that all endpoints share. Created on the event loop's thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.engine_client = EngineClient(settings.endpoint, key=settings.key)
        self.tokenizer_threads = TokenizerThreads(settings.tokenizer)
        self.started_s = int(time.time())

    @property
    def hello(self) -> Hello:
        """The engine's current hello message. Raises ApiError with 503 while no engine serves."""
        status = self.engine_client.status
        if status is None:
            raise ApiError(503, self.engine_client.refusal or f"{NO_ENGINE}: waiting for it", code="engine_away")
        if status.phase != "ready" or status.hello is None:
            reason = f"the engine is {status.phase}" + (f": {status.reason}" if status.reason else "")
            raise ApiError(503, reason, code="engine_away")
        return status.hello

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output: the model's limit, or the capacity of the block pool if
        that is less. 0 if unknown.
        """
        hello = self.hello
        return min(filter(None, (hello.model.max_model_len, hello.cache.max_request_tokens)), default=0)

    @property
    def model_name(self) -> str:
        return self.settings.served_name or self.hello.model.name

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """LoRA adapters by name, from the engine's latest status. An adapter named like the model is left out, because
        it cannot be addressed.
        """
        status = self.engine_client.status
        adapters = {adapter.name: adapter for adapter in status.adapters} if status is not None else {}
        adapters.pop(self.model_name, None)
        return adapters

    async def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter selected by the `model` field of a request body; "" for the base model, or if `name`
        is None.

        If adapters can be loaded at runtime, the engine is queried before an unknown name is refused. Raises ApiError
        with 404 for an unknown name, and with 503 if the engine does not answer.
        """
        if name is None or name == self.model_name:
            return ""
        adapters, status = self.adapters, self.engine_client.status
        if name not in adapters and status is not None and status.takes_adapters:
            try:
                await self.engine_client.refresh()
            except EngineDead as error:
                raise ApiError(503, str(error), code="engine_away") from error
            adapters = self.adapters
        if name not in adapters:
            others = f", or its adapters {', '.join(map(repr, adapters)):.300}" if adapters else ""
            message = f"model {name!r:.140} does not exist here: the model is {self.model_name!r}{others}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name
