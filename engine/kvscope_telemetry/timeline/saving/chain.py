"""By which keyframes and leaps a saved part is gone about in: which of those it was made of are taken.

Owns where the leaps in the new file have got to, and which lists of hashes are in it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.hash_lists import MAX_EARLIER_LISTS, HashPart, ToldList
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import bare_leap
from kvscope_telemetry.recordings.bundles.listed_keyframes import bare_keyframe
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords
from kvscope_telemetry.recordings.keyframes import INTERVAL_NS

_Place = tuple[int, int]
"""Epoch and number of a frame."""
_NOWHERE: Final[_Place] = (-1, -1)
_SMALL_BYTES: Final = 64 << 10
"""A keyframe of no more is taken whenever it is time."""


class Keyframe(Enum):
    """What becomes of one."""

    TAKEN = auto()
    LEFT_OUT = auto()
    TOLD_ANEW = auto()
    """It refers to hashes that are not in the file."""


class Chain:
    """Tell it everything in order."""

    def __init__(self, at: _Place, at_ns: int) -> None:
        self._at, self._since_ns = at, at_ns
        self._num_bytes = 0  # of leaps since then
        self._lists: dict[int, dict[int, bytes]] = {}  # name -> place of the first hash of a part -> the part

    def has(self, part: HashPart) -> None:
        """A part of a list is in the file, and so is all of it before."""
        if part.first == 0:
            self._lists.setdefault(part.list, {})
            if len(self._lists) > MAX_EARLIER_LISTS:
                del self._lists[next(iter(self._lists))]
        if part.list in self._lists:
            self._lists[part.list][part.first] = part.hashes

    @property
    def lists(self) -> list[ToldList]:
        """Those that are in the file, the newest."""
        return [ToldList(name, np.frombuffer(b"".join(parts.values()), "<i8")) for name, parts in self._lists.items()]

    def leapt(self, stored: StoredRecords) -> None:
        """A leap was taken."""
        self._num_bytes += stored.chunk.inflated_bytes
        try:
            leap = bare_leap(stored.messages[0].data)
        except ProtocolError:
            leap = None
        self._at = _NOWHERE if leap is None else (leap.epoch, leap.seq)

    def about(self, stored: StoredRecords, *, begins_file: bool) -> Keyframe:
        """What becomes of a keyframe. One that a file of a ring begins with is there for itself alone."""
        try:
            told = bare_keyframe(stored.messages[0].data)
        except ProtocolError:
            told = None
        at_ns, place = stored.chunk.end_ns, _NOWHERE if told is None else (told[0].hello.epoch, told[0].seq)
        if begins_file and place == self._at != _NOWHERE and not self._is_due(stored):
            return Keyframe.LEFT_OUT
        self._at, self._since_ns, self._num_bytes = place, at_ns, 0
        is_told = told is None or self._lists.keys() >= set(told[1])
        return Keyframe.TAKEN if is_told else Keyframe.TOLD_ANEW

    def _is_due(self, stored: StoredRecords) -> bool:
        """Like the rule of `Keyframes`, by what rows lie in."""
        if stored.chunk.end_ns - self._since_ns < INTERVAL_NS:
            return False
        return self._num_bytes >= stored.chunk.inflated_bytes - _SMALL_BYTES
