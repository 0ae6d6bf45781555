"""Log of blocks that were evicted, copied, saved or loaded since the last telemetry frame.

Bounded; the code that drives a scheduler drains it after each step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from kvscope_telemetry.messages.telemetry import Moves

MAX_IDS: Final = 1 << 16
"""Maximum number of ids of each kind per frame: more than a user can see. Bounds the log if it is not drained."""


class MoveLog:
    """Ids of ledger rows whose content was evicted, copied, saved or loaded since the last drain, as published
    in `messages.telemetry.Moves`.
    """

    __slots__ = ("_copied", "_evicted", "_loaded", "_saved")

    def __init__(self) -> None:
        self._evicted: list[int] = []
        self._copied: list[int] = []
        self._saved: list[int] = []
        self._loaded: list[int] = []

    def record_evicted(self, rows: Sequence[int]) -> None:
        _extend(self._evicted, rows)

    def record_copied(self, rows: Sequence[int]) -> None:
        _extend(self._copied, rows)

    def record_saved(self, rows: Sequence[int]) -> None:
        _extend(self._saved, rows)

    def record_loaded(self, rows: Sequence[int]) -> None:
        _extend(self._loaded, rows)

    def drain(self) -> Moves:
        lists = (self._evicted, self._copied, self._saved, self._loaded)
        if not any(lists):
            return NO_MOVES
        moves = Moves(*map(_pack, lists))
        for rows in lists:
            rows.clear()
        return moves


NO_MOVES: Final = Moves()


def _extend(rows: list[int], more: Sequence[int]) -> None:
    if len(rows) < MAX_IDS:
        rows += more[: MAX_IDS - len(rows)]


def _pack(rows: list[int]) -> bytes:
    return struct.pack(f"<{len(rows)}I", *rows)
