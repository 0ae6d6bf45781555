"""Replaces each place in a list of addresses (`discovery.places`) by the engines that it knows at present."""

from __future__ import annotations

import threading
from typing import Final

from kvscope_telemetry.addresses import saved_key
from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.discovery.places import find_in_place, is_place
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.fleet.list_texts import ListText
from kvscope_telemetry.printable import printable

_POLL_S: Final = 0.05
_STOPPED: Final = "it was stopped"


class AddressText:
    """List of addresses given as arguments."""

    trouble = ""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    @property
    def name(self) -> str:
        return " ".join(self._addresses)

    def read(self, stopped: threading.Event) -> str:
        return "\n".join(self._addresses)


class ExpandedText:
    """List `text` with the engines of its places. If a place does not answer, those that it had before remain, and
    `trouble` says why.

    `api_key` is for places without a saved key.
    """

    def __init__(self, text: ListText, api_key: str = "") -> None:
        self.trouble = ""
        self._text, self._api_key = text, api_key
        self._known: dict[str, list[str]] = {}
        """Lines of the engines of each place, as of its last answer."""

    @property
    def name(self) -> str:
        return self._text.name

    def read(self, stopped: threading.Event) -> str:
        """Return the list. Raises BadInput if it has no line because places do not answer, or once `stopped` is set."""
        lines = self._text.read(stopped).splitlines()
        errors: list[str] = []
        expanded = [each for line in lines for each in self._expand(line, errors, stopped)]
        if stopped.is_set():
            raise BadInput(_STOPPED)
        if errors and not expanded:
            raise BadInput(errors[0])
        more = f" (and {len(errors) - 1:,} more places)" if len(errors) > 1 else ""
        self.trouble = f"{errors[0]}{more}" if errors else ""
        return "\n".join(expanded)

    def _expand(self, line: str, errors: list[str], stopped: threading.Event) -> list[str]:
        text, _, name = " ".join(line.split()).partition(" ")
        if not is_place(text):
            return [line]
        try:
            engines = _find(text, saved_key(read_api_keys(), text) or self._api_key, stopped)
        except KvscopeError as error:
            errors.append(f"{text}: {error}")
            return self._known.get(line, [])
        # Labels and names come from the place: they must not begin a line of their own, which would be an address.
        self._known[line] = [
            " ".join(f"{engine.address} {name} {printable(engine.note)}".split()) for engine in engines
        ]
        return self._known[line]


def _find(text: str, api_key: str, stopped: threading.Event) -> tuple[FoundEngine, ...]:
    """Return the engines of the place `text`. Raises KvscopeError once `stopped` is set; the thread that waits for the
    answer then ends later by itself.
    """
    found: list[tuple[FoundEngine, ...]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(find_in_place(text, api_key=api_key))
        except Exception as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="kvscope-find", daemon=True)
    if not stopped.is_set():
        thread.start()
    while thread.is_alive() and not stopped.is_set():
        thread.join(_POLL_S)
    if stopped.is_set():
        raise KvscopeError(_STOPPED)
    if errors:
        raise errors[0]
    return found[0]
