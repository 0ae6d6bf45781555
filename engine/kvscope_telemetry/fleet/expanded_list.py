"""Replaces each place in a list of addresses (`discovery.places`) by the engines that it knows at present."""

from __future__ import annotations

import threading

from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.discovery.places import find_in_place, is_place
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.fleet.list_texts import ListText


class AddressText:
    """List of addresses given as arguments."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    @property
    def name(self) -> str:
        return " ".join(self._addresses)

    def read(self, stopped: threading.Event) -> str:
        return "\n".join(self._addresses)


class ExpandedText:
    """List `text` with the engines of its places. If a place does not answer, those that it had before remain.

    `api_key` is for places without a saved key.
    """

    def __init__(self, text: ListText, api_key: str = "") -> None:
        self._text, self._api_key = text, api_key
        self._known: dict[str, list[str]] = {}
        """Lines of the engines of each place, as of its last answer."""

    @property
    def name(self) -> str:
        return self._text.name

    def read(self, stopped: threading.Event) -> str:
        """Return the list. Raises BadInput if a place does not answer whose engines are not known."""
        lines = self._text.read(stopped).splitlines()
        return "\n".join(each for line in lines for each in self._expand(line))

    def _expand(self, line: str) -> list[str]:
        text, _, name = line.strip().partition(" ")
        if not is_place(text):
            return [line]
        try:
            engines = find_in_place(text, api_key=read_api_keys().get(text, "") or self._api_key)
        except KvscopeError as error:
            if line not in self._known:
                raise BadInput(f"{text}: {error}") from None
            return self._known[line]
        self._known[line] = [f"{engine.address} {name.strip()} {engine.note}" for engine in engines]
        return self._known[line]
