"""The name and version under which a server serves its model. It is asked once, by the first who needs it."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from kvscope_telemetry.external.address import ExternalAddress
from kvscope_telemetry.external.engine import Version
from kvscope_telemetry.external.engines import find_engine
from kvscope_telemetry.external.http_client import HttpClient, NoAnswer
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
    """The model that it is an adapter of, in vLLM, SGLang and kvscope."""
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class _Model:
    """That is served."""

    name: str
    tells_token_ids: bool
    """Whether the server knows the option that adds token ids to its answers, or at least lets it pass."""


class ServedModel:
    """Of one server. Raises BadInput for a file of certificates that will not do."""

    def __init__(self, address: ExternalAddress) -> None:
        self._address = address
        self._http = HttpClient(address, max_bytes=MAX_BYTES)
        self._lock = threading.Lock()
        self._known: _Model | None = None
        self._version: Version | None = None
        self._num_asked = 0
        self._failure = ""
        self._status = 0
        self._adapters: tuple[LoadedAdapter, ...] | None = None

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters among the models, as they were last asked for; None: the server has not said."""
        return self._adapters

    def look(self) -> None:
        """Ask for them anew; waits for the server. One that gives no answer has said nothing new."""
        with self._lock, suppress(NoAnswer):
            self._cards()

    def get(self) -> _Model:
        """From any thread; may wait for the server. Raises NoAnswer; those who waited meanwhile share it."""
        num_asked = self._num_asked
        with self._lock:
            if self._known is None and self._num_asked != num_asked and self._failure:
                raise NoAnswer(self._failure, self._status)
            if self._known is None:
                self._known = self._noted()
            return self._known

    def version(self) -> Version:
        """As the server says, `NEWEST` where it does not. From any thread; may wait for it, once."""
        with self._lock:
            if self._version is None:
                self._version = self._asked_version()
            return self._version

    def forget(self) -> None:
        """The server knows no such model: it may serve another by now."""
        with self._lock:
            self._known = self._version = None

    def close(self) -> None:
        """Whoever waits for it waits no longer."""
        self._http.cancel()

    def _asked_version(self) -> Version:
        try:
            version = msgspec.json.decode(self._http.get(VERSION)[1], type=_Version).version
        except (NoAnswer, msgspec.DecodeError, UnicodeError, RecursionError):
            return NEWEST
        major, minor, *_ = [*version.split("."), "", ""]
        is_number = all(part.isascii() and part.isdigit() and len(part) < 10 for part in (major, minor))
        return (int(major), int(minor)) if is_number else NEWEST

    def _noted(self) -> _Model:
        self._failure = ""
        try:
            return self._ask()
        except NoAnswer as error:
            self._failure, self._status = str(error), error.status
            raise
        finally:
            self._num_asked += 1

    def _ask(self) -> _Model:
        cards = self._cards()
        if not cards:
            raise NoAnswer(f"{self._address.url(MODELS)} lists no model to send prompts to")
        wanted = self._address.model
        card = next((one for one in cards if one.id == wanted), cards[0])
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
