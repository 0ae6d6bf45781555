"""Saves and loads that were asked for and not yet started, gathered so that many go in one large copy.

Saves come before loads. What cannot be put in that order, or has two copies to one target, must start first.
"""

from __future__ import annotations

from collections.abc import Sequence


class PendingCopies:
    """Pairs (place, block) to save and to load. No two saves to one place, no two loads to one block."""

    def __init__(self) -> None:
        self.saves: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []
        self._saved_places: set[int] = set()
        self._loaded_places: set[int] = set()
        self._loaded_blocks: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads)

    def admits_saves(self, blocks: Sequence[int], places: Sequence[int]) -> bool:
        """Whether these saves may come before the loads that wait, beside the saves that wait."""
        return not (self.touches(places) or not self._loaded_blocks.isdisjoint(blocks))

    def admits_loads(self, blocks: Sequence[int]) -> bool:
        """Whether these loads may come beside the loads that wait."""
        return self._loaded_blocks.isdisjoint(blocks)

    def touches(self, places: Sequence[int]) -> bool:
        """Whether any of these places waits to be read or written."""
        return not (self._saved_places.isdisjoint(places) and self._loaded_places.isdisjoint(places))

    def add_saves(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Saves that `admits_saves` lets in."""
        self.saves += zip(places, blocks, strict=True)
        self._saved_places.update(places)

    def add_loads(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Loads that `admits_loads` lets in."""
        self.loads += zip(places, blocks, strict=True)
        self._loaded_places.update(places)
        self._loaded_blocks.update(blocks)

    @property
    def places(self) -> set[int]:
        """All that wait to be read or written."""
        return self._saved_places | self._loaded_places
