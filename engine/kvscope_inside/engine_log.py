"""Logger whose messages appear in the host engine's log.

Imports no other module of kvscope, because every process of the host engine loads it.
"""

from __future__ import annotations

import logging


def engine_log(host: str) -> logging.Logger:
    """Return the logger `HOST.kvscope`, a child of the host's logger. `host`: name of the host's Python package."""
    return logging.getLogger(f"{host}.kvscope")
