"""Configures host memory on a CPU: the memory that the C library retains between steps, and the size of oneDNN's
caches.

A step's buffers of some MiB are allocated and freed in each layer. By default, glibc returns them to the system and
gets them again, zeroed page by page. Measured at 32 requests, that is four fifths of sampling's time and up to a third
of paged attention's.

oneDNN compiles each product for its shape and caches the last 1,024 of them, 0.5 to 1 MB each. Steps differ in their
number of tokens: measured on the default model, a busy engine cached 0.9 GB in bfloat16 and 1.5 GB in float32.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
MAX_FREE_HEAP_BYTES: Final = 256 << 20
"""Maximum free bytes at the top of the heap; more is returned to the system."""
MAX_HEAP_BUFFER_BYTES: Final = 32 << 20
"""Maximum bytes of a buffer on the heap; the largest value that glibc accepts on all systems."""
MAX_COMPILED_PRODUCTS: Final = 128
"""Maximum number of cached products, enough for about twenty numbers of tokens. Compiling one takes 0.6 ms, once for
all layers.
"""
_CACHE_VARIABLES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN's cache and of torch's layer above it. An entry in either keeps a product alive."""


def limit_compiled_products() -> None:
    """Limit oneDNN's caches by the environment variables that it reads on first use. Existing values are respected."""
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, str(MAX_COMPILED_PRODUCTS))


def keep_freed_memory() -> bool:
    """Configure glibc to retain freed memory. Returns whether the C library has these settings and accepted them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BUFFER_BYTES) and mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES))
