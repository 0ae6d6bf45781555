"""Distinguishes a lack of memory from a bad file: libraries report both with errors of their own kinds."""

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
