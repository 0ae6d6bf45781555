"""Imports the engine, which brings torch and transformers: what a command does as late as it can."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kvscope_engine.cli.interrupts import leaving_on_interrupt

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine


def engine_class() -> type[Engine]:
    """`Engine`, imported with the garbage collector at rest.

    An import makes some 400,000 objects that stay, and the collector looks at all of them again and again: measured,
    a fifth of the time to the first token. Afterwards it leaves them alone, so its pauses are short in the steps too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with leaving_on_interrupt():
            from kvscope_engine.engine import Engine
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
    return Engine
