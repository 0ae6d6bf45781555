"""Queries the name of the model that a server serves, its LoRA adapters, and the server's version, once for all
callers.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.external_engine import Version
from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.collectors.http_client import HttpClient, NoAnswer
from kvscope_telemetry.messages.commands import MAX_ADAPTER_CHARACTERS, LoadedAdapter

MODELS: Final = "/v1/models"
VERSION: Final = "/version"
NEWEST: Final = (1 << 30, 0)
MAX_BYTES: Final = 4 << 20


class _Version(msgspec.Struct):
    version: str = ""


class _Card(msgspec.Struct):
    id: str
    owned_by: str | None = None
    parent: str | None = None
    """Name of the base model if the entry is an adapter (in vLLM, SGLang and kvscope); None for a base model."""
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    returns_token_ids: bool
    """Whether the server supports, or at least ignores, the option that adds token ids to its answers."""


class ServedModel:
    """Model and version of one server. Raises BadInput if the certificate file of `address` cannot be used."""

    def __init__(self, address: ExternalAddress) -> None:
        self._address = address
        self._http = HttpClient(address, max_bytes=MAX_BYTES)
        self._lock = threading.Lock()
        self._model: _Model | None = None
        self._version: Version | None = None
        self._num_queries = 0
        self._failure = ""
        self._status = 0
        self._adapters: tuple[LoadedAdapter, ...] | None = None

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters among the server's models, as of the last query; None before the server has answered."""
        return self._adapters

    def refresh(self) -> None:
        """Query the adapters again, waiting for the server. `adapters` remains unchanged if it does not answer."""
        with self._lock, suppress(NoAnswer):
            self._cards()

    def get(self) -> _Model:
        """Return the model, waiting for the server if it is unknown. Thread-safe.

        Raises NoAnswer if the query fails, also in threads that waited for the query of another thread.
        """
        num_queries = self._num_queries
        with self._lock:
            if self._model is None and self._num_queries != num_queries and self._failure:
                raise NoAnswer(self._failure, self._status)
            if self._model is None:
                self._model = self._query_and_record()
            return self._model

    def version(self) -> Version:
        """Return the server's version, or `NEWEST` if it reports none. Thread-safe; the first call waits for the
        server.
        """
        with self._lock:
            if self._version is None:
                self._version = self._query_version()
            return self._version

    def invalidate(self) -> None:
        """Query model and version again on next use, because the server no longer serves the model."""
        with self._lock:
            self._model = self._version = None

    def close(self) -> None:
        """Cancel queries, so that waiting callers get an error."""
        self._http.cancel()

    def _query_version(self) -> Version:
        try:
            version = msgspec.json.decode(self._http.get(VERSION)[1], type=_Version).version
        except (NoAnswer, msgspec.DecodeError, UnicodeError, RecursionError):
            return NEWEST
        major, minor, *_ = [*version.split("."), "", ""]
        is_number = all(part.isascii() and part.isdigit() and len(part) < 10 for part in (major, minor))
        return (int(major), int(minor)) if is_number else NEWEST

    def _query_and_record(self) -> _Model:
        self._failure = ""
        try:
            return self._query_model()
        except NoAnswer as error:
            self._failure, self._status = str(error), error.status
            raise
        finally:
            self._num_queries += 1

    def _query_model(self) -> _Model:
        cards = self._cards()
        if not cards:
            raise NoAnswer(f"{self._address.url(MODELS)} lists no model to send prompts to")
        wanted = self._address.model
        card = next((other for other in cards if other.id == wanted), cards[0])
        return _Model(wanted or card.id, find_engine(card.owned_by or "") is not None)

    def _cards(self) -> list[_Card]:
        _, body = self._http.get(MODELS)
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            url = self._address.url(MODELS)
            raise NoAnswer(f"{url} is not a list of models: is it another program's port?") from None
        adapters = (card for card in cards if card.parent and 0 < len(card.id) <= MAX_ADAPTER_CHARACTERS)
        self._adapters = tuple(LoadedAdapter(name=card.id, path=card.root or "") for card in adapters)
        return cards
