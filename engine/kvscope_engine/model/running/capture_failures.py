"""Remembers the sizes of CUDA graphs that could not be captured: each failure affects its own size alone, is reported
once, and is seldom retried.

Knows no graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Final

import torch

RETRY_S: Final = 300.0
"""Until a capture is tried again for which there was no memory: somebody else's may be free by then, and each try holds
all requests up for three steps or so. What failed for another reason is never tried again."""


class CaptureFailures:
    """`tell` is told of each size that gets no graph, on one line, once."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._not_before_s: dict[Hashable, float] = {}

    def may_try(self, key: Hashable) -> bool:
        """Whether a capture is worth its time now."""
        return time.monotonic() >= self._not_before_s.get(key, 0.0)

    def refuse(self, key: Hashable, error: Exception) -> None:
        """A capture raised `error`, which the note on another one says too."""
        has_no_memory = isinstance(error, torch.OutOfMemoryError)
        self._not_before_s[key] = time.monotonic() + RETRY_S if has_no_memory else math.inf

    def note(self, key: Hashable, size: str, error: Exception) -> None:
        """A capture raised `error`; what it took is given back. `size`: of the steps that have no graph, in words."""
        is_new = key not in self._not_before_s
        self.refuse(key, error)
        torch.cuda.empty_cache()
        if is_new:
            later = "; it will be retried later" if isinstance(error, torch.OutOfMemoryError) else ""
            self._tell(f"no CUDA graph for {size}, which run slower: {failure_words(error)}{later}")


def failure_words(error: Exception) -> str:
    """One line of what CUDA says at length."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
