"""Configures host memory on a CPU: the memory that the C library retains between steps, and the size of oneDNN's
caches.

A step's buffers of some MiB are allocated and freed in each layer. By default, glibc returns them to the system and
gets them again, zeroed page by page. Measured at 32 requests, that is four fifths of sampling's time and up to a third
of paged attention's.

oneDNN compiles each matmul for its shape and caches the last 1,024 of them, 0.5 to 1 MB each. Steps differ in their
number of tokens: measured on the default model, a busy engine cached 0.9 GB in bfloat16 and 1.5 GB in float32.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
MAX_FREE_HEAP_BYTES: Final = 256 << 20
"""Maximum free bytes that glibc retains at the top of the heap; it returns the excess to the system."""
MAX_HEAP_BUFFER_BYTES: Final = 32 << 20
"""Maximum bytes of a buffer that glibc allocates on the heap; the largest value that it accepts on all systems."""
MAX_COMPILED_MATMULS: Final = 128
"""Maximum number of compiled matmuls that oneDNN caches, enough for about twenty different numbers of tokens.

Compiling one takes 0.6 ms, once for all layers.
"""
_CACHE_VARIABLES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that size oneDNN's cache and torch's cache above it; a compiled matmul may be in either."""


def limit_compiled_matmuls() -> None:
    """Limit oneDNN's and torch's caches of compiled matmuls. Call it before the first matmul.

    The libraries read the environment variables on first use. Values that the user set are respected.
    """
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, str(MAX_COMPILED_MATMULS))


def keep_freed_memory() -> bool:
    """Configure glibc to retain freed memory. Returns False if the C library has no such settings or refuses them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BUFFER_BYTES) and mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP_BYTES))
