"""Runs a function on its own thread. The GUI thread polls its progress and result. Imports no Qt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback

_Result = TypeVar("_Result")


class Background(Generic[_Result]):
    """Runs `work` on a daemon thread, which starts in the constructor.

    `work` receives a progress callback, which takes the fraction done (0 to 1) and returns False once the work was
    cancelled. After the thread ended, `result` is the return value of `work`, or `failure` the text of its error.
    Neither is set if the work was cancelled.
    """

    def __init__(self, work: Callable[[ProgressCallback], _Result], name: str) -> None:
        self.share = 0.0
        """Fraction of the work that is done, 0 to 1."""
        self.result: _Result | None = None
        self.failure = ""
        self._work = work
        self._is_cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_cancelled(self) -> bool:
        """Whether the work was cancelled, by `cancel` or by raising `OpeningCancelled`."""
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """Request cancellation. The work ends when it next reports its progress."""
        self._is_cancelled.set()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the thread to end. Returns whether it has ended."""
        self._thread.join(seconds)
        return self.is_finished

    def _report_progress(self, share: float) -> bool:
        self.share = share
        return not self._is_cancelled.is_set()

    def _run(self) -> None:
        try:
            self.result = self._work(self._report_progress)
        except OpeningCancelled:
            self._is_cancelled.set()
        except KvscopeError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = error.strerror or str(error)
        except Exception as error:  # any other error is shown to the user, too
            self.failure = f"{type(error).__name__}: {error}"
