"""Detection, by source code, of modules that call transformers' attention interface."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


@cache  # reading a class's source takes 0.5 ms, and a load asks for each module of the model several times
def uses_interface(kind: Any) -> bool:
    """Whether modules of the class `kind` attend through transformers' attention interface."""
    try:
        return "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(kind.forward)
    except (OSError, TypeError, AttributeError):
        return False
