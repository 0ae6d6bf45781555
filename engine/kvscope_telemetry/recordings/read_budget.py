"""Bounds the work of opening a recording: bytes and seconds, whatever the file claims.

Owns what is left of both, and tells whoever waits how far it is. Knows no format.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_STEP_BYTES: Final = 512 << 20
STEP_BYTES_A_STORED_BYTE: Final = 32
"""Each of the three steps of opening a file (walking over its records, settling what is in doubt, finding the engines)
inflates and looks at so much at most: so many bytes, and so many for each byte that the file has on the disk."""
MAX_STEP_S: Final = 30.0
MAX_INFLATED_BYTES: Final = 4 << 30
INFLATED_BYTES_A_STORED_BYTE: Final = 64
"""All chunks of a file together may claim so much: what follows is left out."""
RECORD_BYTES: Final = 256
"""What a record costs besides its bytes."""
_LOOK_EVERY: Final = 4 << 20

ProgressCallback = Callable[[float], bool]
"""Told the share that is done, 0 to 1; False ends it."""


class ReadBudgetSpent(Exception):
    """The budget is used up; the message says which part of it."""


class OpeningCancelled(Exception):
    """The watcher of the work cancelled it."""


class ReadBudget:
    """What is left for a file that has `num_stored` bytes on the disk. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        num_stored: int,
        watch: ProgressCallback | None = None,
        *,
        max_seconds: float = MAX_STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_inflated = MAX_INFLATED_BYTES + INFLATED_BYTES_A_STORED_BYTE * num_stored
        self._max_bytes = MAX_STEP_BYTES + STEP_BYTES_A_STORED_BYTE * num_stored
        self._max_seconds = max_seconds
        self._clock = clock
        self._watch = watch
        self.begin_step(0.0, 1.0)

    def begin_step(self, from_share: float, to_share: float) -> None:
        """Begin the step between these shares of the whole, with the budget of one step."""
        self._from, self._to, self._share = from_share, to_share, from_share
        self._left = self._max_bytes
        self._until_s = self._clock() + self._max_seconds
        self._unwatched = _LOOK_EVERY  # the first bytes are looked at too

    def is_at(self, part: float) -> None:
        """How much of the step is done, 0 to 1."""
        self._share = self._from + (self._to - self._from) * min(part, 1.0)

    def spend(self, num_bytes: int) -> None:
        """Take these bytes from the budget before reading them. Raises ReadBudgetSpent when it is used up,
        OpeningCancelled when nobody waits.
        """
        self._left -= num_bytes
        if self._left < 0:
            raise ReadBudgetSpent(f"more than {self._max_bytes >> 20} MiB would have to be looked at")
        self._unwatched += num_bytes
        if self._unwatched >= _LOOK_EVERY:
            self._unwatched = 0
            self._look()

    def _look(self) -> None:
        if self._watch is not None and not self._watch(self._share):
            raise OpeningCancelled
        if self._clock() > self._until_s:
            raise ReadBudgetSpent(f"it took longer than {self._max_seconds:.0f} s")
