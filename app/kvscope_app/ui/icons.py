"""Renders kvscope's SVG icons in a theme colour, as pixmaps instead of by a `QIconEngine` written in Python."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import resources
from typing import Final

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt
from PySide6.QtGui import QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer

from kvscope_app.ui.zoom import scaled

_PLACEHOLDER_COLOR: Final = "#000001"
"""Colour in the SVG files that is replaced by the requested colour."""
_SCALES: Final = (1, 2, 3)
_FOLDER: Final = resources.files("kvscope_resources") / "icons"


def icon(name: str, color: str, disabled: str | None = None, size: int = 18) -> QIcon:
    """Return an icon for display scales up to 3, in `color` (`#rrggbb`).

    `size` is in device-independent pixels at 100 % zoom. `disabled` is the colour of the disabled state.
    """
    size, result = scaled(size), QIcon()
    _add_pixmaps(result, name, color, size, QIcon.Mode.Normal)
    if disabled is not None:
        _add_pixmaps(result, name, disabled, size, QIcon.Mode.Disabled)
    return result


def app_icon() -> QIcon:
    result = QIcon()
    for size in (16, 24, 32, 48, 64, 128, 256):
        result.addPixmap(pixmap("kvscope", _PLACEHOLDER_COLOR, size, 1))
    return result


@lru_cache(maxsize=2048)
def pixmap(name: str, color: str, size: int, scale: int = 2) -> QPixmap:
    """Render an icon with `scale` device pixels per device-independent pixel. Results are cached and shared."""
    renderer = QSvgRenderer(QByteArray(_source(name).replace(_PLACEHOLDER_COLOR, color).encode()))
    result = QPixmap(QSize(size, size) * scale)
    result.fill(Qt.GlobalColor.transparent)
    painter = QPainter(result)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    renderer.render(painter, QRectF(0, 0, size * scale, size * scale))
    painter.end()
    result.setDevicePixelRatio(scale)
    return result


def names() -> list[str]:
    return sorted(entry.name.removesuffix(".svg") for entry in _FOLDER.iterdir() if entry.name.endswith(".svg"))


def chevron_path(is_dark: bool, where: str = "") -> str:
    """Return the path of a chevron's image file for stylesheets, which accept no pixmaps.

    `where` is the direction: `up`, `left`, `right`, or "" for down.
    """
    return _stylesheet_path(f"chevron-{where}" if where else "chevron", is_dark)


def check_path(is_dark: bool) -> str:
    return _stylesheet_path("check", is_dark)


def _stylesheet_path(name: str, is_dark: bool) -> str:
    name = f"{name}-on-{'dark' if is_dark else 'light'}.svg"
    with resources.as_file(_FOLDER / name) as path:
        return path.as_posix()


@cache
def _source(name: str) -> str:
    return (_FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def _add_pixmaps(target: QIcon, name: str, color: str, size: int, mode: QIcon.Mode) -> None:
    for scale in _SCALES:
        target.addPixmap(pixmap(name, color, size, scale), mode)
