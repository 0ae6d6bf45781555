"""Distinguishes a lack of memory from other failures. Libraries report both with exceptions of their own types."""

from __future__ import annotations

from typing import Final

import torch

_PHRASES: Final = (
    "can't allocate memory",
    "cannot allocate memory",
    "os error 12",
    "out of memory",
    "status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` reports that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)


def clear_traceback(error: BaseException) -> None:
    """Drop the traceback and causes of `error`. Its frames keep a step's tensors alive, whose memory could not be
    freed."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def is_library_error(error: BaseException) -> bool:
    """Whether torch, code that torch calls, or Triton raised `error`. Such errors may affect one step and not the next.

    Other errors come from this project's own code.
    """
    is_tritons = any(base.__module__.partition(".")[0] == "triton" for base in type(error).__mro__)
    is_ours = isinstance(error, NotImplementedError | RecursionError)
    return is_tritons or (isinstance(error, RuntimeError) and not is_ours)
