"""Moves of blocks that came since the map was last drawn: bounded, the newest win. numpy alone."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvscope_app.views.page_map.drawing.cells import Ids
from kvscope_app.views.page_map.drawing.flash_kinds import MOVES, FlashKind
from kvscope_app.views.page_map.drawing.flashes import MAX_MOVES_AT_ONCE
from kvscope_telemetry.source import Update

_NOTHING: Final = np.empty(0, np.uint32)


class PendingMoves:
    """Takes updates, gives the ids of each kind; knows which kinds this engine has shown."""

    def __init__(self) -> None:
        self._ids: dict[FlashKind, Ids] = {}
        self.seen: set[FlashKind] = set()

    def add(self, update: Update) -> None:
        """Remember the moves of `update`."""
        for kind, ids in zip(MOVES, (update.evicted, update.copied, update.saved, update.loaded), strict=True):
            if ids.size:
                self.seen.add(kind)
                kept = np.concatenate([self._ids.get(kind, _NOTHING), ids[-MAX_MOVES_AT_ONCE:]])
                self._ids[kind] = kept[-MAX_MOVES_AT_ONCE:]

    def take(self) -> dict[FlashKind, Ids]:
        """The ids of each kind that there are, oldest first; they are gone afterwards."""
        taken, self._ids = self._ids, {}
        return taken

    def forget(self) -> None:
        """Another engine, or another state of it: nothing is pending."""
        self._ids.clear()
