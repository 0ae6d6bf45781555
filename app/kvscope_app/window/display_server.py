"""Checks whether a window can be opened before Qt is asked, because Qt ends the program where it cannot."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError

_PACKAGES: Final = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libOpenGL.so.0": "libopengl0",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libX11.so.6": "libx11-6",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libxcb.so.1": "libxcb1",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render.so.0": "libxcb-render0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-shm.so.0": "libxcb-shm0",
    "libxcb-sync.so.1": "libxcb-sync1",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xfixes.so.0": "libxcb-xfixes0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
    "libwayland-client.so.0": "libwayland-client0",
    "libwayland-cursor.so.0": "libwayland-cursor0",
}
"""Debian's package of each library that Qt's wheel takes from the system."""


def is_display_named(environment: Mapping[str, str]) -> bool:
    """Whether a display is named, or none is needed."""
    return not _needs_x(environment) or bool(environment.get("DISPLAY"))


def require_display(environment: Mapping[str, str]) -> None:
    """Raise KvscopeError when no display is named or the named one does not answer."""
    if not is_display_named(environment):
        raise KvscopeError(
            "no display: neither DISPLAY nor WAYLAND_DISPLAY is set; run it in a desktop session,"
            " through `ssh -X`, or under `xvfb-run kvscope`"
        )
    if _needs_x(environment):
        require_x_server(environment["DISPLAY"])


def _needs_x(environment: Mapping[str, str]) -> bool:
    platform = environment.get("QT_QPA_PLATFORM", "").partition(":")[0]
    if platform and platform not in ("xcb", "wayland"):
        return False
    return platform == "xcb" or not environment.get("WAYLAND_DISPLAY")


def require_qt() -> None:
    """Raise KvscopeError naming the Debian package when Qt or its X11 plugin misses a system library."""
    try:
        from PySide6 import QtGui
    except ImportError as error:
        raise KvscopeError(missing_library(str(error))) from error
    if os.environ.get("QT_QPA_PLATFORM", "xcb").startswith("xcb") and not os.environ.get("WAYLAND_DISPLAY"):
        plugin = Path(QtGui.__file__).parent / "Qt" / "plugins" / "platforms" / "libqxcb.so"
        _require_loadable(plugin)


def require_sound_qt() -> None:
    """Raise KvscopeError for a PySide6 that corrupts reference counts on this Python (6.12 below 3.12)."""
    import PySide6

    if PySide6.__version_info__[:2] >= (6, 12) and sys.version_info < (3, 12):
        raise KvscopeError(
            f"PySide6 {PySide6.__version__} corrupts memory on Python {sys.version.split()[0]}:"
            " pip install 'PySide6-Essentials>=6.11,<6.12'"
        )


def missing_library(message: str) -> str:
    """One line for the error of an import or a loader, with the package that mends it where it is known."""
    found = re.search(r"(lib[\w.+-]+\.so(?:\.\d+)*): cannot open shared object file", message)
    if found is None:
        return f"Qt cannot be loaded: {message}"
    package = _PACKAGES.get(found[1])
    remedy = f"apt-get install {package}" if package else f"install the package that has {found[1]}"
    return f"Qt needs the system library {found[1]}, which is missing here: {remedy}"


def _require_loadable(plugin: Path) -> None:
    if not plugin.exists():
        return
    try:
        ctypes.CDLL(str(plugin))
    except OSError as error:
        raise KvscopeError(missing_library(str(error))) from error


def require_x_server(display: str) -> None:
    try:
        xcb = ctypes.CDLL("libxcb.so.1")
    except OSError:
        return  # require_qt tells about missing libraries
    xcb.xcb_connect.restype = ctypes.c_void_p
    xcb.xcb_connect.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    connection = ctypes.c_void_p(xcb.xcb_connect(display.encode(), None))
    failed = xcb.xcb_connection_has_error(connection)
    xcb.xcb_disconnect(connection)
    if failed:
        raise KvscopeError(f"no display: the X server at DISPLAY={display!r} does not answer")
