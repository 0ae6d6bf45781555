"""Updates that the reading thread made and nobody took yet: the hand-over between two threads, bounded.

When the taker stays away too long everything is dropped, and a snapshot is needed before state goes on: its
memory is bounded, and what is taken is never wrong. Knows no sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvscope_telemetry.source import Update
from kvscope_telemetry.state.coalesce import merge, size_of

MAX_ENTRIES: Final = 2_000_000
"""Changed blocks, requests, frames and events that wait: some 70 MB, ten seconds at 5,000 frames/s."""
ENTRY_BYTES: Final = 32
"""Of the wire, that count as an entry where that is more: names and words have no bound of their own."""


class Pending:
    """Put on one side, taken on the other; both at any time and without waiting."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.num_frames_discarded = 0
        self._max_entries = max_entries
        self._updates: deque[tuple[Update, int]] = deque()
        self._num_entries = 0
        self._needs_snapshot = False
        self._overflowed = False
        self._lock = threading.Lock()

    def put(self, update: Update, num_bytes: int = 0) -> None:
        """Append, of so many bytes on the wire; what lacks the state before it is dropped."""
        num_entries = max(1 + size_of(update), num_bytes // ENTRY_BYTES)
        with self._lock:
            if update.snapshot is not None:
                self._needs_snapshot = self._overflowed = False
            elif self._needs_snapshot and update.series:
                self.num_frames_discarded += len(update.series["seq"])
                return
            self._updates.append((update, num_entries))
            self._num_entries += num_entries
            if self._num_entries > self._max_entries and len(self._updates) > 1:
                self._discard()
                self._overflowed = True

    def take(self) -> Update | None:
        """What waits, merged, up to the next snapshot: that begins the update after."""
        with self._lock:
            ready: list[Update] = []
            while self._updates and not (ready and self._updates[0][0].snapshot is not None):
                update, num_entries = self._updates.popleft()
                ready.append(update)
                self._num_entries -= num_entries
        return merge(ready) if ready else None

    def discard(self) -> None:
        """Drop what waits: the state it follows is lost. Only a snapshot makes a new beginning."""
        with self._lock:
            self._discard()

    def take_overflow(self) -> bool:
        """Whether a snapshot has to be asked for because of an overflow; says so once."""
        with self._lock:
            overflowed, self._overflowed = self._overflowed, False
            return overflowed

    def _discard(self) -> None:
        self.num_frames_discarded += sum(len(u.series["seq"]) for u, _ in self._updates if u.series)
        self._updates.clear()
        self._num_entries = 0
        self._needs_snapshot = True
