"""Whose a pin is: a block stays pinned until nobody holds it there any more, and a pin ends with who set it.

Knows neither the engine nor sockets. Belongs to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable


class PinBook:
    """Blocks by the clients that pinned them."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, set[int]] = {}
        self._names: dict[bytes, str] = {}

    @property
    def names(self) -> str:
        """Of all that pin something, for people; empty when nobody does."""
        return ", ".join(dict.fromkeys(self._names.values()))

    @property
    def holders(self) -> list[bytes]:
        """The clients that do."""
        return list(self._blocks)

    def name(self, client: bytes) -> str:
        """What a client that pins something is called."""
        return self._names.get(client, "somebody")

    def add(self, client: bytes, name: str, blocks: Iterable[int]) -> None:
        """The client pinned `blocks`."""
        self._blocks.setdefault(client, set()).update(blocks)
        self._names[client] = name

    def take(self, client: bytes, blocks: Iterable[int] = ()) -> tuple[int, list[int]]:
        """The client's pins on `blocks`, all it has where none are given, end: how many, and those nobody else has."""
        held = self._blocks.get(client, set())
        ended = held & set(blocks) if blocks else set(held)
        held -= ended
        if not held:
            self._blocks.pop(client, None)
            self._names.pop(client, None)
        others = set().union(*self._blocks.values()) if self._blocks else set()
        return len(ended), sorted(ended - others)

    def clear(self) -> None:
        """No block is pinned any more."""
        self._blocks.clear()
        self._names.clear()
