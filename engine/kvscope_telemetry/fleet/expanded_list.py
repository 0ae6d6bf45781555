"""Replaces each place in a list of addresses (`discovery.places`) by the engines that it knows at present."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.discovery.places import find_in_place, is_place
from kvscope_telemetry.errors import KvscopeError
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
    """List `text` with the engines of its places. A place that does not answer remains: its row says why.

    `api_key` is for places without a saved key.
    """

    def __init__(self, text: ListText, api_key: str = "") -> None:
        self._text, self._api_key = text, api_key

    @property
    def name(self) -> str:
        return self._text.name

    def read(self, stopped: threading.Event) -> str:
        lines = self._text.read(stopped).splitlines()
        return "\n".join(each for line in lines for each in self._expand(line))

    def _expand(self, line: str) -> Iterator[str]:
        text, _, name = line.strip().partition(" ")
        if not is_place(text):
            yield line
            return
        try:
            engines = find_in_place(text, api_key=read_api_keys().get(text, "") or self._api_key)
        except KvscopeError:
            engines = ()
        if not engines:
            yield line
        for engine in engines:
            yield f"{engine.address} {name.strip()} {engine.note}"
