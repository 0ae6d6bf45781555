"""Leaps on which a state goes on, gathered so that many of them can be read as one.

Owns which of them follow one another. Knows no files; what cannot be joined is tried leap by leap, so that damage costs
the leap that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.leap import Leap, check_leap
from kvscope_telemetry.recordings.bundles.leaps.opened_leaps import OpenedLeap, joined_leap
from kvscope_telemetry.state.state_place import StatePlace

JOINED_ROWS: Final = 1 << 14
"""Of blocks, about, in leaps that are joined: with many more the columns leave the processor's cache."""
JOINED_HASHES: Final = 1 << 20
"""In the lists that they refer to, each counted as often: a file that claims more has its leaps read one by one."""

FoundLeap = tuple[int, int, Leap]
"""Where the chunk of the last of those that are joined in it is in the file, when that was, and the leap."""


class LeapRun:
    """On from the state at `place`, which is brought along. `on_bad` is told where one cannot be read."""

    def __init__(self, place: StatePlace, on_bad: Callable[[int], None]) -> None:
        self._place, self._on_bad = place, on_bad
        self._ahead = place.copy()  # of what was gathered
        self._gathered: list[tuple[int, int, OpenedLeap]] = []
        self._num_rows = self._num_hashes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to take."""
        return self._num_rows >= JOINED_ROWS or self._num_hashes >= JOINED_HASHES

    def add(self, offset: int, log_time_ns: int, leap: OpenedLeap) -> None:
        """The next in the file; one that is not gone on with is passed over."""
        if self._ahead.is_before(leap.bare):
            self._ahead.advance(leap.bare)
            self._gathered.append((offset, log_time_ns, leap))
            self._num_rows += leap.num_rows
            self._num_hashes += leap.listed.size

    def go_on(self, leap: Leap) -> bool:
        """With a leap that was joined before, or needs not be; False where it does not follow. Take first."""
        if not self._place.is_before(leap):
            return False
        self._place.advance(leap)
        self._ahead = self._place.copy()
        return True

    def take(self) -> list[FoundLeap]:
        """What was gathered, as one; leap by leap up to the first that cannot be read, where there is such."""
        gathered, self._gathered = self._gathered, []
        self._num_rows = self._num_hashes = 0
        if not gathered:
            return []
        try:
            found = [(*gathered[-1][:2], _checked([leap for _, _, leap in gathered]))]
        except ProtocolError:
            found = self._one_by_one(gathered)
        self._ahead = self._place.copy()
        return [each for each in found if self.go_on(each[2])]

    def _one_by_one(self, gathered: list[tuple[int, int, OpenedLeap]]) -> list[FoundLeap]:
        found = []
        for offset, log_time_ns, opened in gathered:
            try:
                found.append((offset, log_time_ns, _checked([opened])))
            except ProtocolError:
                self._on_bad(offset)
                break
        return found


def _checked(leaps: list[OpenedLeap]) -> Leap:
    leap = joined_leap(leaps)
    check_leap(leap)
    return leap
