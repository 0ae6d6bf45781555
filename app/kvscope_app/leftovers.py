"""What a closed window leaves in Qt's caches, in the garbage collector and in malloc, and how it is given back.

Knows no windows. Each is called on the GUI thread, between two turns of the event loop.
"""

from __future__ import annotations

import ctypes
import gc

from PySide6.QtGui import QPixmapCache
from PySide6.QtWidgets import QApplication

from kvscope_app.look.theming.apply_theme import forget_rules


def give_back(app: QApplication) -> None:
    """A window's widgets are gone: so goes what was remembered for them."""
    forget_rules(app)
    QPixmapCache.clear()  # drawings of icons, up to 10 MiB of them, whether anybody shows the icon or not
    spare_the_collector()
    _trim()


def spare_the_collector() -> None:
    """What is there now stays: full collections, which stop the window, need not look at it again. What closed
    windows left is collected first, though it was set aside so when they were opened."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _trim() -> None:
    """Free pages go back to the system, some 20 MiB; malloc keeps those that are not at the end of its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(ctypes.c_size_t(0))
