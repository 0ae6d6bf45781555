"""Weights of a GPU in memory segments of their own, so that what is given up one by one can be given back.

transformers first takes one piece of memory as large as the model and lets torch cut it up. When joining later gives up
weights here and there, the holes could be used by nothing larger, and nothing could go back to the driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def segment_a_weight() -> Iterator[None]:
    """Inside, loading takes memory as it needs it. Without such a step in transformers there is nothing to do."""
    from transformers import modeling_utils

    with patch.object(modeling_utils, "caching_allocator_warmup", _take_nothing, create=True):
        yield


def _take_nothing(*_: Any, **__: Any) -> None:
    """Loading works without."""
