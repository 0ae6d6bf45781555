"""Base class of all live sources: holds a mirror, applies updates to it, and lets callers wait for updates.

Subclasses provide the updates.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Update

_RECHECK_INTERVAL_S: Final = 0.05


class MirroredSource(ABC):
    """Source with a mirror; a context manager that closes the source at the end. Subclasses must notify
    `changed` when messages arrive.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.mirror = Mirror()
        """State as of the last call of `update_mirror()`."""
        self._changed = changed

    @abstractmethod
    def poll_update(self) -> Update | None:
        """Return and clear everything received since the last call; None if nothing arrived."""

    @abstractmethod
    def resync(self) -> None:
        """Discard pending updates and request a snapshot, after an update could not be applied."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and close the sockets. Idempotent."""

    def update_mirror(self) -> Update | None:
        """Apply the pending update to `mirror` and return it; None if no update is pending.

        An update that cannot be applied to the mirror is rejected completely, and a snapshot is requested (see
        `status.resyncs`).
        """
        update = self.poll_update()
        if update is None:
            return None
        try:
            self.mirror.apply(update)
        except ProtocolError:
            self.resync()
            return None
        return update

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, checking whenever something arrives. Returns False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            with self._changed:
                self._changed.wait(min(rest_s, _RECHECK_INTERVAL_S))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
