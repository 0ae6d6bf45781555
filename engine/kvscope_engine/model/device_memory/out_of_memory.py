"""Distinguishes a lack of memory from other failures, although libraries report both with their own exception types."""

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
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)


def clear_traceback(error: BaseException) -> None:
    """Drop the traceback and causes of `error`, because their frames keep a step's tensors and their memory alive."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def is_library_error(error: BaseException) -> bool:
    """Whether torch, code that torch calls, or Triton raised `error`, and not this project's own code.

    Errors of libraries may affect one step and not the next.
    """
    is_tritons = any(base.__module__.partition(".")[0] == "triton" for base in type(error).__mro__)
    is_ours = isinstance(error, NotImplementedError | RecursionError)
    return is_tritons or (isinstance(error, RuntimeError) and not is_ours)
