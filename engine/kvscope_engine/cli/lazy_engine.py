"""Imports the engine, and with it torch and transformers, as late as possible."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvscope_engine.cli.quick_transformers import import_transformers
from kvscope_telemetry.termination import leaving_while_importing

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine


def engine_class() -> type[Engine]:
    """Import and return `Engine`. Garbage collection is disabled during the import."""
    with quick_imports(), leaving_while_importing("kvscope-engine"):
        import_transformers()
        from kvscope_engine.engine import Engine
    return Engine


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable the garbage collector in the context, and exempt the objects created so far from later collection.

    torch and transformers create some 400,000 permanent objects. Scanning them repeatedly would take a fifth of the
    time from the start of a command to its first output. Exempting them also shortens the collector's pauses during
    steps.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
