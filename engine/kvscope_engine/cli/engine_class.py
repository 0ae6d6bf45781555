"""Imports the engine, and with it torch and transformers, which a command does as late as it can."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvscope_telemetry.termination import leaving_while_importing

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine


def engine_class() -> type[Engine]:
    """`Engine`, imported with the garbage collector at rest."""
    with quick_imports(), leaving_while_importing("kvscope-engine"):
        from kvscope_engine.engine import Engine
    return Engine


@contextmanager
def quick_imports() -> Iterator[None]:
    """The garbage collector rests meanwhile, and leaves alone afterwards what was made.

    Torch and transformers make some 400,000 objects that stay, and the collector looks at all of them again and again:
    measured, a fifth of the time to the first token or plan. Its pauses are short in the steps, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
