"""What all live sources have in common: a mirror that takes what came, and waiting for something to come.

Owns the mirror; where updates come from is the source's.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.source import Update
from kvscope_telemetry.state.mirror import Mirror

_LOOK_AGAIN_S: Final = 0.05


class MirroredSource(ABC):
    """A context manager that closes at the end. `changed` is notified when something came."""

    def __init__(self, changed: threading.Condition) -> None:
        self.mirror = Mirror()
        """The state as of the last `update_mirror()`."""
        self._changed = changed

    @abstractmethod
    def take_update(self) -> Update | None:
        """What came since the last call, None when nothing did."""

    @abstractmethod
    def resync(self) -> None:
        """For a taker that could not apply an update: drop what waits, begin anew with the whole state."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and free the sockets. Idempotent."""

    def update_mirror(self) -> Update | None:
        """Take what came and apply it to `mirror`; what was applied, None when nothing was.

        What does not fit is refused whole, and a snapshot makes it good: see `status.resyncs`.
        """
        update = self.take_update()
        if update is None:
            return None
        try:
            self.mirror.apply(update)
        except ProtocolError:
            self.resync()
            return None
        return update

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, looking again whenever something came; whether it did in time."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                return False
            with self._changed:
                self._changed.wait(min(rest_s, _LOOK_AGAIN_S))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
