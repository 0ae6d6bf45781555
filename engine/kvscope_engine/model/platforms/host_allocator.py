"""Host memory on a CPU: what the C library keeps for the next step, and what oneDNN may keep at all.

A step's buffers of some MiB come and go each layer. By default glibc gives them back to the system and takes them
again, zeroed page by page. Measured at 32 requests, that is four fifths of sampling's time and up to a third of paged
attention's.

oneDNN compiles each product for its shape and keeps the last 1,024 of them, 0.5 to 1 MB each. Steps differ in their
number of tokens: measured on the default model, a busy engine kept 0.9 GB of them in bfloat16 and 1.5 GB in float32.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 256 << 20
"""Free memory at the top of the heap beyond which it is given back."""
MAX_HEAP_BUFFER_BYTES: Final = 32 << 20
"""Buffers up to this come from the heap; the largest that glibc accepts everywhere."""
MAX_COMPILED_PRODUCTS: Final = 128
"""Those of some twenty numbers of tokens; compiling one that is not there takes 0.6 ms, once for all layers."""
_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of torch's layer above it. Each holds what the other has let go."""


def bound_compiled_products() -> None:
    """Bound oneDNN's caches, which read this when they are first used. Whoever set them otherwise has the last word."""
    for name in _CACHES:
        os.environ.setdefault(name, str(MAX_COMPILED_PRODUCTS))


def keep_freed_memory() -> bool:
    """Set it for this process; whether the C library has such a setting and took it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BUFFER_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
