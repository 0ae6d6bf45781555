"""Records which CUDA graphs are missing, because a capture failed or they were released, and when to try again.

Each failure affects only its own size, is reported once, and is retried after growing pauses. Must not depend on the
graphs themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from kvscope_engine.model.device_memory.out_of_memory import clear_traceback, is_library_error, is_out_of_memory

Key = TypeVar("Key")

FIRST_PAUSE_S: Final = 2.0
MAX_PAUSE_S: Final = 30.0
"""Maximum seconds between two attempts to capture the graph of one size. An attempt delays requests that arrive
meanwhile by about three steps.
"""
MAX_TRIES: Final = 4
"""Maximum number of attempts to capture a graph that CUDA refuses for a reason other than missing memory.
Errors other than RuntimeError are never retried.
"""


class CaptureFailures:
    """CUDA graphs by key whose capture failed, or that were released to free memory, until they are captured.

    `report` is called with one line when a capture fails, and when the same graph is captured later.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._retry_at_s: dict[Hashable, float] = {}
        self._tries: dict[Hashable, int] = {}
        self._reported: set[Hashable] = set()
        self._is_suspended = False

    @property
    def is_suspended(self) -> bool:
        return self._is_suspended

    def set_suspended(self, is_suspended: bool) -> None:
        self._is_suspended = is_suspended

    def contains(self, key: Hashable) -> bool:
        """Whether the graph `key` could not be captured or was released, and has not been captured since."""
        return key in self._retry_at_s

    def may_try(self, key: Hashable) -> bool:
        return not self._is_suspended and time.monotonic() >= self._retry_at_s.get(key, 0.0)

    def due_keys(self) -> Iterator[Hashable]:
        return (key for key in list(self._retry_at_s) if self.may_try(key))

    @property
    def is_waiting(self) -> bool:
        """Whether any capture will be retried."""
        return not self._is_suspended and any(retry_at_s < math.inf for retry_at_s in self._retry_at_s.values())

    def record(self, key: Hashable, error: Exception, *, is_permanent: bool = False) -> None:
        """Record that a capture raised `error`, without a report, because one report about another key stands for all
        failed keys.

        `is_permanent`: whether the capture is never retried.
        """
        self._tries[key] = self._tries.get(key, 0) + 1
        self._retry_at_s[key] = math.inf if is_permanent else time.monotonic() + self._pause_s(key, error)

    def record_and_report(
        self, key: Hashable, description: str, error: Exception, *, is_permanent: bool = False
    ) -> None:
        """Record that a capture raised `error`, and report it once.

        `description`: the steps that have no graph, in the plural, such as "batches of 8".
        """
        self.record(key, error, is_permanent=is_permanent)
        if key not in self._reported:
            self._reported.add(key)
            later = "" if math.isinf(self._retry_at_s[key]) else "; it will be retried later"
            self._report(f"no CUDA graph for {description}, which run slower: {failure_reason(error)}{later}")

    def defer(self, key: Hashable) -> None:
        """Record that a graph was released to free memory for a step. It may be captured again after a pause."""
        self._retry_at_s[key] = time.monotonic() + FIRST_PAUSE_S

    def record_capture(self, key: Hashable, description: str) -> None:
        """Record a successful capture, and report it if its failure was reported."""
        self._tries.pop(key, None)
        self._retry_at_s.pop(key, None)
        if key in self._reported:
            self._reported.discard(key)
            self._report(f"{description} have a CUDA graph again")

    def _pause_s(self, key: Hashable, error: Exception) -> float:
        tries = self._tries[key]
        if not is_out_of_memory(error) and (not isinstance(error, RuntimeError) or tries >= MAX_TRIES):
            return math.inf
        return float(min(FIRST_PAUSE_S * 2 ** min(tries - 1, 9), MAX_PAUSE_S))


def is_capture_failure(error: Exception) -> bool:
    """Whether `error` is a lack of memory or an error of a library. Such a failure may affect one graph size and not
    the next.
    """
    return is_out_of_memory(error) or is_library_error(error)


def try_capture(
    capture: Callable[[], object], accepts: Callable[[Exception], bool] = is_capture_failure
) -> Exception | None:
    """Call `capture` and return the exception that it raised, if `accepts` accepts it; other exceptions propagate.

    The traceback is dropped: it would keep the failed graph, its memory pool and the step's activations alive. The next
    capture would then have less memory, and might use a cuBLAS workspace in that pool, which is freed once the
    exception is dropped (pytorch#193402). Cached memory is released before this returns.
    """
    try:
        capture()
    except Exception as error:
        if not accepts(error):
            raise
        failure = error
    else:
        return None
    clear_traceback(failure)
    torch.cuda.empty_cache()
    return failure


def try_each_key(keys: Sequence[Key], try_key: Callable[[Key], Exception | None]) -> dict[Key, Exception]:
    """Call `try_key`, which returns the exception of a failed capture, for each key. Return the exceptions by key.

    If CUDA refuses the first key, the others are not tried and get the same exception: the model cannot be captured at
    all, and each try leaks memory (`is_refusal`).
    """
    failures: dict[Key, Exception] = {}
    for key in keys:
        if (error := try_key(key)) is not None:
            failures[key] = error
            if key == keys[0] and is_refusal(error):
                return dict.fromkeys(keys, error)
    return failures


def is_refusal(error: Exception) -> bool:
    """Whether CUDA refuses the captured operations, such as a read on the host. The messages of these errors mention
    capturing.

    torch 2.13 then considers the capture's pool in use forever and never releases the memory of any graph in it
    (pytorch#190348).
    """
    return isinstance(error, RuntimeError) and "captur" in str(error).lower() and not is_out_of_memory(error)


def failure_reason(error: Exception) -> str:
    """Return the type and the first line of an exception, shortened to 200 characters."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
