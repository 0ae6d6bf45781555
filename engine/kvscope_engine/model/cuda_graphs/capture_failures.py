"""Remembers the sizes of CUDA graphs that could not be captured: each failure affects its own size alone, is reported
once, and is tried again after pauses that grow.

Knows no graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from kvscope_engine.model.device_memory.out_of_memory import is_no_memory, is_of_library, let_go_of_frames

Key = TypeVar("Key")

FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two tries of one size: each holds a request up for three steps or so that comes meanwhile."""
MAX_TRIES: Final = 4
"""Of a capture that CUDA refuses for another reason than memory. What is no error of CUDA's is never tried again."""


class CaptureFailures:
    """`tell` is told of each size that gets no graph, on one line, once, and when it has one after all."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._not_before_s: dict[Hashable, float] = {}
        self._tries: dict[Hashable, int] = {}
        self._told: set[Hashable] = set()
        self._is_held = False

    @property
    def is_held(self) -> bool:
        """Whether nothing is to be captured."""
        return self._is_held

    def hold(self, is_held: bool) -> None:
        """While held nothing is captured, whatever was put off."""
        self._is_held = is_held

    def has(self, key: Hashable) -> bool:
        """Whether it failed, or was given back, and was not captured since."""
        return key in self._not_before_s

    def may_try(self, key: Hashable) -> bool:
        """Whether a capture is worth its time now."""
        return not self._is_held and time.monotonic() >= self._not_before_s.get(key, 0.0)

    def due(self) -> Iterator[Hashable]:
        """Sizes that failed and may be tried again now."""
        return (key for key in list(self._not_before_s) if self.may_try(key))

    @property
    def is_waiting(self) -> bool:
        """Whether anything is to be tried again."""
        return not self._is_held and any(not_before_s < math.inf for not_before_s in self._not_before_s.values())

    def refuse(self, key: Hashable, error: Exception, *, for_good: bool = False) -> None:
        """A capture raised `error`, which the note on another one says too. `for_good`: it is not tried again."""
        self._tries[key] = self._tries.get(key, 0) + 1
        self._not_before_s[key] = math.inf if for_good else time.monotonic() + self._pause_s(key, error)

    def note(self, key: Hashable, size: str, error: Exception, *, for_good: bool = False) -> None:
        """A capture raised `error`. `size`: of the steps that have no graph, in words."""
        self.refuse(key, error, for_good=for_good)
        if key not in self._told:
            self._told.add(key)
            later = "" if math.isinf(self._not_before_s[key]) else "; it will be retried later"
            self._tell(f"no CUDA graph for {size}, which run slower: {failure_words(error)}{later}")

    def put_off(self, key: Hashable) -> None:
        """Its graph was given back, for memory that a step needed: it may be captured again after a pause."""
        self._not_before_s[key] = time.monotonic() + FIRST_PAUSE_S

    def captured(self, key: Hashable, size: str) -> None:
        """A capture succeeded."""
        self._tries.pop(key, None)
        self._not_before_s.pop(key, None)
        if key in self._told:
            self._told.discard(key)
            self._tell(f"{size} have a CUDA graph again")

    def _pause_s(self, key: Hashable, error: Exception) -> float:
        tries = self._tries[key]
        if not is_no_memory(error) and (not isinstance(error, RuntimeError) or tries >= MAX_TRIES):
            return math.inf
        return float(min(FIRST_PAUSE_S * 2 ** min(tries - 1, 9), LONGEST_PAUSE_S))


def is_capture_failure(error: Exception) -> bool:
    """Whether memory was missing, or a library raised it: of one size perhaps, and not of the next."""
    return is_no_memory(error) or is_of_library(error)


def failure_of(
    capture: Callable[[], object], accepts: Callable[[Exception], bool] = is_capture_failure
) -> Exception | None:
    """The error of those that it `accepts` which `capture` raised; others are raised.

    It comes without its traceback, which would keep the failed graph, its memory pool and the step's activations: the
    next capture would have less memory, and might use a workspace of cuBLAS's in that pool, which is freed once the
    error is dropped (pytorch#193402). The memory is given back before this returns.
    """
    try:
        capture()
    except Exception as error:
        if not accepts(error):
            raise
        failure = error
    else:
        return None
    let_go_of_frames(failure)
    torch.cuda.empty_cache()
    return failure


def failures_of(keys: Sequence[Key], capture: Callable[[Key], Exception | None]) -> dict[Key, Exception]:
    """What `capture` returns of those that fail. Where CUDA refuses the first the others are not tried: it is the
    model's own, and each try leaves memory behind (`is_refusal`)."""
    failures: dict[Key, Exception] = {}
    for key in keys:
        if (error := capture(key)) is not None:
            failures[key] = error
            if key == keys[0] and is_refusal(error):
                return dict.fromkeys(keys, error)
    return failures


def is_refusal(error: Exception) -> bool:
    """Whether CUDA refuses what is captured, such as a read on the host; its words for that speak of capturing. torch
    2.13 then takes the pool of the capture to be in use for ever, and gives the memory of no graph in it back
    (pytorch#190348)."""
    return isinstance(error, RuntimeError) and "captur" in str(error).lower() and not is_no_memory(error)


def failure_words(error: Exception) -> str:
    """One line of what CUDA says at length."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
