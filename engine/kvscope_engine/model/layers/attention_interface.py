"""Detects, from source code, modules that call transformers' attention interface."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def uses_interface(module_class: Any) -> bool:
    """Whether modules of this class call transformers' attention interface."""
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in forward_source(module_class)


def forward_source(kind: Any) -> str:
    """Return the source code of `kind.forward`, or an empty string if it cannot be read."""
    return _forward_source(kind)


@cache  # reading source code takes 0.5 ms, and a load asks for the class of each module several times
def _forward_source(kind: Any) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError, AttributeError):
        return ""
