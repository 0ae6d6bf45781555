"""State shared by all endpoints: the engine client, the model's tokenizer, limits, and the served model names."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from kvscope_engine.http.engine_client import EngineClient
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.tokenizer_threads import ApiTokenizer
from kvscope_engine.server.service_limits import ServiceLimits
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.transport.client_sockets import NO_ENGINE

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits on the connections, requests and memory that clients may use in this process."""

    max_connections: int = 16_384
    """Maximum number of open connections, active or idle, lowered to the process's limit on open files.

    Further connections are refused with HTTP status 503.
    """
    max_requests: int = 1024
    """Maximum number of requests in progress. Clients with few requests may use an eighth more."""
    max_choices: int = ServiceLimits().client_requests.count
    """Maximum number of choices in progress per client (`n` for each prompt). Equals the engine's limit."""
    max_body_bytes: int = 16 * MIB
    max_bodies_bytes: int = 256 * MIB
    """Maximum bytes of all bodies that are not read completely or not tokenized yet. One client may use half of it."""
    header_s: float = 15.0
    """Maximum time in seconds to receive a request's headers, from the connection or the first byte on."""
    chunk_s: float = 10.0
    """Maximum time in seconds between two chunks of a body."""
    body_s: float = 120.0
    """Maximum time in seconds to receive a whole body."""
    write_s: float = 60.0
    """Maximum time in seconds for which a client may not read while the send buffer is full."""
    keep_alive_s: float = 75.0
    """Maximum time in seconds for which a connection may be idle between two requests."""
    drain_s: float = 30.0
    """Maximum time in seconds to complete the requests in progress at shutdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP server."""

    endpoint: str
    key: Path | None = None
    api_key: str = field(default="", repr=False)
    """Accepted keys, separated by commas; empty: no key is required."""
    trust_forwarded: bool = False
    """Whether clients are identified by the last address of `X-Forwarded-For`.

    Only safe behind a proxy that sets it.
    """
    served_name: str = ""
    """Model name for clients; empty: the engine's name."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; None: found by the model's name."""
    tool_call_parser: str = ""
    """Format in which the model calls tools; empty: detected from its chat template."""
    limits: HttpLimits = HttpLimits()
    open_paths: frozenset[str] = frozenset()
    """Mounted paths that need no API key."""


def api_keys(text: str) -> list[str]:
    """Split `text` at commas. Raises BadInput if one of the keys is empty."""
    keys = [key.strip() for key in text.split(",")] if text else []
    if not all(keys):
        raise BadInput("an empty API key is not accepted: KEY, or KEY,KEY for several")
    return keys


class Api:
    """State of the process, created on the event loop's thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.engine_client = EngineClient(settings.endpoint, key=settings.key)
        self.text = ApiTokenizer(settings.tokenizer)
        self.started_s = int(time.time())

    @property
    def hello(self) -> Hello:
        """The engine's current hello. Raises ApiError with 503 while no engine serves."""
        status = self.engine_client.status
        if status is None:
            raise ApiError(503, self.engine_client.refusal or f"{NO_ENGINE}: waiting for it", code="engine_away")
        if status.phase != "ready" or status.hello is None:
            reason = f"the engine is {status.phase}" + (f": {status.reason}" if status.reason else "")
            raise ApiError(503, reason, code="engine_away")
        return status.hello

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its output: the model's limit, or the capacity of the block pool if that is
        less.
        """
        hello = self.hello
        return min(filter(None, (hello.model.max_model_len, hello.cache.max_request_tokens)), default=0)

    @property
    def model_name(self) -> str:
        return self.settings.served_name or self.hello.model.name

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """LoRA adapters by name, from the engine's latest status.

        An adapter named like the model cannot be addressed.
        """
        status = self.engine_client.status
        found = {adapter.name: adapter for adapter in status.adapters} if status is not None else {}
        found.pop(self.model_name, None)
        return found

    async def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter selected by a body's `model`; empty for the base model, or without a name.

        If adapters can be loaded at runtime, the engine is queried before an unknown name is refused. Raises ApiError
        with 404 for unknown names.
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
