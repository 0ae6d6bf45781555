"""Numbers the open windows of each kind across all kvscope processes of a user, so that each slot has its own geometry.

Owns the locks: one file per slot in a folder next to the settings. The system releases them when a process ends for any
reason. A file has content only while the window of its slot is being opened; content without a lock means that a
process ended before its window was open. If locking is not supported, only the windows of this process are
distinguished.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvscope_telemetry import operating_system

_FOLDER: Final = "open-windows"
_OPENING_MARK: Final = b"opening\n"
MAX_SLOTS: Final = 64
"""Maximum number of slots that have a lock. Windows with higher numbers are not distinguished from those of other
processes.
"""


class WindowSlots:
    """Slot numbers of the open windows, counted from 1 for each kind of window."""

    def __init__(self, settings_file: Path) -> None:
        self._folder = settings_file.parent / _FOLDER
        self._locks: dict[tuple[str, int], int | None] = {}
        """File descriptor of the lock for each (kind, slot) of this process; None if the slot is used without a lock.
        """

    def acquire(self, kind: str) -> int:
        for slot in itertools.count(1):
            if (kind, slot) in self._locks:
                continue
            if slot > MAX_SLOTS or self._lock(kind, slot):
                self._locks.setdefault((kind, slot), None)
                return slot
        raise AssertionError("there is always another number")

    def start_opening(self, kind: str, slot: int) -> bool:
        """Record that the window of `slot` is being opened.

        Returns whether the last process that opened a window in this slot ended before the window was open.
        """
        descriptor = self._locks[(kind, slot)]
        if descriptor is None:
            return False
        failed_before = os.fstat(descriptor).st_size > 0
        with suppress(OSError):  # on a full disk, failed starts are not detected
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, _OPENING_MARK)
        return failed_before

    def finish_opening(self, kind: str, slot: int) -> None:
        """Record that the window of `slot` opened successfully, or was closed normally."""
        descriptor = self._locks.get((kind, slot))
        if descriptor is not None:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)

    def release(self, kind: str, slot: int) -> None:
        self.finish_opening(kind, slot)
        descriptor = self._locks.pop((kind, slot), None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        for kind, slot in list(self._locks):
            self.release(kind, slot)

    def _lock(self, kind: str, slot: int) -> bool:
        descriptor = -1
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._folder / f"{kind}-{slot}", operating_system.LOCK_FILE_FLAGS | os.O_CREAT, 0o600)
            operating_system.lock(descriptor, wait=False)
        except OSError as error:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
            return not isinstance(error, BlockingIOError)
        self._locks[(kind, slot)] = descriptor
        return True
