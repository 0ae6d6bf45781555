"""Runs work on a thread of its own, polled from the GUI thread. Owns the thread. Knows no Qt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback

_Made = TypeVar("_Made")


class Background(Generic[_Made]):
    """Begins at once: `work` is given a watch, which is told the share that is done and says whether to go on.

    When it is over, `made` is what it returned, or `failure` says why not; neither, when it was given up.
    """

    def __init__(self, work: Callable[[ProgressCallback], _Made], name: str) -> None:
        self.share = 0.0
        """What is done, 0 to 1."""
        self.made: _Made | None = None
        self.failure = ""
        self._work = work
        self._is_unwanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread ended."""
        return not self._thread.is_alive()

    @property
    def is_unwanted(self) -> bool:
        """Whether it was given up."""
        return self._is_unwanted.is_set()

    def cancel(self) -> None:
        """Ask the work to stop; it ends soon after."""
        self._is_unwanted.set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; returns whether the work is over."""
        self._thread.join(seconds)
        return self.is_over

    def _watch(self, share: float) -> bool:
        self.share = share
        return not self._is_unwanted.is_set()

    def _run(self) -> None:
        try:
            self.made = self._work(self._watch)
        except OpeningCancelled:
            self._is_unwanted.set()
        except KvscopeError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = error.strerror or str(error)
        except Exception as error:  # whatever it is, a person is told
            self.failure = f"{type(error).__name__}: {error}"
