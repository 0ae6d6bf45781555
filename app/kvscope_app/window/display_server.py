"""Checks whether a window can be opened before Qt is used, because Qt ends the process if it cannot."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import KvscopeError

_CONNECT_TIMEOUT_S: Final = 2.0
"""Maximum wait in seconds for a connection to a Wayland compositor."""
_MIN_COLOR_DEPTH: Final = 15
"""Minimum bits per pixel of an X screen. Qt crashes when it paints on a screen with 8."""
_ROOT_DEPTH_OFFSET: Final = 38
"""Byte offset of `root_depth` in `xcb_screen_t`: after five 32-bit fields, six 16-bit fields, the visual ID and two
bytes.
"""


def is_display_named(environment: Mapping[str, str]) -> bool:
    """Whether the environment names a display, or a Qt platform that needs no display."""
    return any(platform != "xcb" or environment.get("DISPLAY") for platform in _platforms(environment))


def require_display(environment: Mapping[str, str]) -> None:
    """Raise KvscopeError if Qt could not open a window; Qt would end the process without an explanation."""
    failures = []
    for platform in _platforms(environment):
        failure = _platform_failure(platform, environment)
        if not failure:
            return
        failures.append(failure)
    raise KvscopeError("; ".join(failures))


def _platforms(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the platform plugins that Qt tries, in the order in which it tries them."""
    from_variable = [name.partition(":")[0] for name in environment.get("QT_QPA_PLATFORM", "").split(";") if name]
    if from_variable:
        return from_variable
    variables = {"wayland": "WAYLAND_DISPLAY", "xcb": "DISPLAY"}
    return [name for name, variable in variables.items() if environment.get(variable)] or ["xcb"]


def _platform_failure(platform: str, environment: Mapping[str, str]) -> str:
    """Return why Qt's `platform` cannot show a window, or "" if no obstacle is known."""
    if not _has_plugin(platform, environment):
        return f"QT_QPA_PLATFORM={platform!r} is not accepted: must be one of {', '.join(_plugins())}"
    if platform == "xcb":
        return _x_failure(environment.get("DISPLAY", ""))
    return _wayland_failure(environment) if platform == "wayland" else ""


def _plugins() -> list[str]:
    """Return the names of the platform plugins in PySide6's folder, without importing PySide6."""
    spec = importlib.util.find_spec("PySide6")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("**/plugins/platforms/*q*")]
    return sorted(file.stem.removeprefix("lib").removeprefix("q") for file in files)


def _has_plugin(platform: str, environment: Mapping[str, str]) -> bool:
    if any(environment.get(name) for name in ("QT_QPA_PLATFORM_PLUGIN_PATH", "QT_PLUGIN_PATH")):
        return True  # plugins installed by the user
    plugins = _plugins()
    return not plugins or platform.partition("-")[0] in plugins  # wayland-egl is in the plugin wayland


def _wayland_failure(environment: Mapping[str, str]) -> str:
    if environment.get("WAYLAND_SOCKET"):  # a descriptor of an open connection
        return ""
    name = environment.get("WAYLAND_DISPLAY") or "wayland-0"
    path = os.path.join(environment.get("XDG_RUNTIME_DIR", ""), name)  # an absolute name stays as it is
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(path)
        except OSError as error:
            reason = error.strerror or error
            return f"no display: the Wayland compositor at WAYLAND_DISPLAY={name!r} does not answer ({reason})"
    return ""


def require_qt() -> None:
    """Raise KvscopeError if PySide6 is not installed, or if Qt or its X11 plugin lacks a system library.

    The message names what to install: the extra `app`, or the Debian package of the library.
    """
    try:
        from PySide6 import QtGui
    except ModuleNotFoundError as error:
        raise KvscopeError(f"windows need {error.name}, which is not installed: pip install 'kvscope[app]'") from error
    except ImportError as error:
        raise KvscopeError(missing_library(str(error))) from error
    if os.environ.get("QT_QPA_PLATFORM", "xcb").startswith("xcb") and not os.environ.get("WAYLAND_DISPLAY"):
        plugin = Path(QtGui.__file__).parent / "Qt" / "plugins" / "platforms" / "libqxcb.so"
        _require_loadable(plugin)


def require_sound_qt() -> None:
    """Raise KvscopeError if PySide6 is version 6.12 or newer and Python is older than 3.12. This combination corrupts
    reference counts.

    See docs/internals/decisions/0011-pyside6-stays-below-6-12.md.
    """
    import PySide6

    if PySide6.__version_info__[:2] >= (6, 12) and sys.version_info < (3, 12):
        raise KvscopeError(
            f"PySide6 {PySide6.__version__} corrupts memory on Python {sys.version.split()[0]}:"
            " pip install 'PySide6-Essentials>=6.11,<6.12'"
        )


def missing_library(message: str) -> str:
    """Return a one-line message for an import or loader error. It names the Debian package that contains the missing
    library, if known.
    """
    match = re.search(r"(lib[\w.+-]+\.so(?:\.\d+)*): cannot open shared object file", message)
    if match is None:
        return f"Qt cannot be loaded: {message}"
    lines = resources.files("kvscope_resources").joinpath("qt_libraries.txt").read_text().splitlines()
    package = dict(line.split() for line in lines).get(match[1])
    remedy = f"apt-get install {package}" if package else f"install the package that has {match[1]}"
    return f"Qt needs the system library {match[1]}, which is missing here: {remedy}"


def _require_loadable(plugin: Path) -> None:
    if not plugin.exists():
        return
    try:
        ctypes.CDLL(str(plugin))
    except OSError as error:
        raise KvscopeError(missing_library(str(error))) from error


def _x_failure(display: str) -> str:
    if not display:
        return (
            "no display: neither DISPLAY nor WAYLAND_DISPLAY is set; run it in a desktop session,"
            " through `ssh -X`, or under `xvfb-run kvscope`"
        )
    try:
        xcb = ctypes.CDLL("libxcb.so.1")
    except OSError:
        return ""  # require_qt names missing libraries
    xcb.xcb_connect.restype = xcb.xcb_get_setup.restype = ctypes.c_void_p
    xcb.xcb_connect.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    xcb.xcb_setup_roots_iterator.restype = _ScreenIterator
    connection = ctypes.c_void_p(xcb.xcb_connect(display.encode(), None))
    depth = _MIN_COLOR_DEPTH
    has_failed = xcb.xcb_connection_has_error(connection)
    if not has_failed:
        screens = xcb.xcb_setup_roots_iterator(ctypes.c_void_p(xcb.xcb_get_setup(connection)))
        depth = ctypes.c_uint8.from_address(screens.data + _ROOT_DEPTH_OFFSET).value
    xcb.xcb_disconnect(connection)
    if has_failed:
        return f"no display: the X server at DISPLAY={display!r} does not answer"
    if depth < _MIN_COLOR_DEPTH:
        return f"the X server at DISPLAY={display!r} has {depth} bits per pixel; {_MIN_COLOR_DEPTH} or more are needed"
    return ""


class _ScreenIterator(ctypes.Structure):
    """ctypes mirror of `xcb_screen_iterator_t`."""

    _fields_ = (("data", ctypes.c_void_p), ("rem", ctypes.c_int), ("index", ctypes.c_int))
