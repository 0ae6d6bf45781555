"""Distinguishes a lack of memory from other failures: libraries report both with errors of their own kinds."""

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


def is_no_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)


def let_go_of_frames(error: BaseException) -> None:
    """Drop what `error` keeps of where it was raised: a step's tensors, whose memory can be given back only then."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def is_of_library(error: BaseException) -> bool:
    """Whether torch, what torch calls, or Triton raised it: they may fail of one step and not of the next. Other errors
    are of our own code."""
    is_tritons = any(base.__module__.partition(".")[0] == "triton" for base in type(error).__mro__)
    is_ours = isinstance(error, NotImplementedError | RecursionError)
    return is_tritons or (isinstance(error, RuntimeError) and not is_ours)
