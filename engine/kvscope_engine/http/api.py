"""The state that every endpoint shares: the engine client, the model's tokenizer, limits, and the served
model names.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from kvscope_engine.http.engine_client import EngineClient
from kvscope_engine.http.shapes.errors import ApiError
from kvscope_engine.http.text import TextSide
from kvscope_engine.server.limits import ServiceLimits
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import LoadedAdapter
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.sockets.client_sockets import NO_ENGINE

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients may take of this process."""

    max_connections: int = 16_384
    """At a time, busy or idle; fewer where this process may open fewer files. More are refused with 503."""
    max_requests: int = 1024
    """Being answered at a time; an eighth more for clients that have few."""
    max_choices: int = ServiceLimits().client_requests.count
    """Of one client at a time, n for each prompt; the engine takes no more either."""
    max_body_bytes: int = 16 * MIB
    max_bodies_bytes: int = 256 * MIB
    """Of all bodies that are being read, or are not yet tokens; half of it of one client."""
    header_s: float = 15.0
    """For a request's head, from the connection or its first byte on."""
    chunk_s: float = 10.0
    """Without a byte of a body."""
    body_s: float = 120.0
    """For a whole body."""
    write_s: float = 60.0
    """That a client may leave a full buffer unread."""
    keep_alive_s: float = 75.0
    drain_s: float = 30.0
    """For requests under way at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How the API is served."""

    endpoint: str
    key: Path | None = None
    api_key: str = field(default="", repr=False)
    """Several are separated by commas; empty: none is asked for."""
    trust_forwarded: bool = False
    """Whether clients are known by the last address of `X-Forwarded-For`: only behind a proxy that writes it."""
    served_name: str = ""
    """What the model is called; empty: as the engine calls it."""
    tokenizer: Path | None = None
    """Its folder, where it cannot be found by the model's name."""
    tool_call_parser: str = ""
    """The format in which the model calls tools; empty: what its chat template speaks of."""
    limits: HttpLimits = HttpLimits()
    open_paths: frozenset[str] = frozenset()
    """Of mounted pages that are shown without the API key as well."""


def api_keys(text: str) -> list[str]:
    """Those that are separated by commas in `text`. Raises BadInput for an empty one among them."""
    keys = [key.strip() for key in text.split(",")] if text else []
    if not all(keys):
        raise BadInput("an empty API key is not accepted: KEY, or KEY,KEY for several")
    return keys


class Api:
    """One for a process, made in its event loop's thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.line = EngineClient(settings.endpoint, key=settings.key)
        self.text = TextSide(settings.tokenizer)
        self.started_s = int(time.time())

    @property
    def hello(self) -> Hello:
        """The engine as it is now. Raises ApiError with 503 while there is none that serves."""
        status = self.line.status
        if status is None:
            raise ApiError(503, self.line.refusal or f"{NO_ENGINE}: waiting for it", code="engine_away")
        if status.phase != "ready" or status.hello is None:
            reason = f"the engine is {status.phase}" + (f": {status.reason}" if status.reason else "")
            raise ApiError(503, reason, code="engine_away")
        return status.hello

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output: the model's limit, or what the whole block pool holds if less."""
        hello = self.hello
        return min(filter(None, (hello.model.max_model_len, hello.cache.max_request_tokens)), default=0)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_name or self.hello.model.name

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """LoRA adapters by name, as the engine said last. One that is called as the model is has no name of its own."""
        status = self.line.status
        found = {adapter.name: adapter for adapter in status.adapters} if status is not None else {}
        found.pop(self.model_name, None)
        return found

    async def adapter_of(self, name: str | None) -> str:
        """The LoRA adapter that a body means by its `model`; empty: the model alone, as without a name. Raises ApiError
        with 404 for what is neither; where adapters come and go, the engine is asked before."""
        if name is None or name == self.model_name:
            return ""
        adapters, status = self.adapters, self.line.status
        if name not in adapters and status is not None and status.takes_adapters:
            try:
                await self.line.refresh()
            except EngineDead as error:
                raise ApiError(503, str(error), code="engine_away") from error
            adapters = self.adapters
        if name not in adapters:
            others = f", or its adapters {', '.join(map(repr, adapters)):.300}" if adapters else ""
            message = f"model {name!r:.140} does not exist here: the model is {self.model_name!r}{others}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name
