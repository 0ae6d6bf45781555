"""The log that users of a host engine read. Imports nothing else of kvscope: each process of the host loads it."""

from __future__ import annotations

import logging


def engine_log(host: str) -> logging.Logger:
    """Return kvscope's logger among those of `host`, by the name of its Python package."""
    return logging.getLogger(f"{host}.kvscope")
