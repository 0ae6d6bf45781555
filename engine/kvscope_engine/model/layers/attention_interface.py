"""Detection, by source code, of modules that call transformers' attention interface."""

from __future__ import annotations

import inspect
from typing import Any


def uses_interface(kind: Any) -> bool:
    """Whether modules of the class `kind` attend through transformers' attention interface."""
    try:
        return "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(kind.forward)
    except (OSError, TypeError, AttributeError):
        return False
