"""Icons: our own SVG files drawn in the theme's colour, as plain pixmaps (no Python icon engine)."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import resources
from typing import Final

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt
from PySide6.QtGui import QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer

from kvscope_app.look.zoom import scaled

_INK: Final = "#000001"
"""The colour in the SVG files that stands for the theme's."""
_SCALES: Final = (1, 2, 3)
_FOLDER: Final = resources.files("kvscope_resources") / "icons"


def icon(name: str, color: str, disabled: str | None = None, size: int = 18) -> QIcon:
    """Icon `name` in `color` (`#rrggbb`), `size` device-independent pixels at 100 %, sharp up to three times that."""
    size, result = scaled(size), QIcon()
    _add(result, name, color, size, QIcon.Mode.Normal)
    if disabled is not None:
        _add(result, name, disabled, size, QIcon.Mode.Disabled)
    return result


def app_icon() -> QIcon:
    """The application's own icon, in its own colours."""
    result = QIcon()
    for size in (16, 24, 32, 48, 64, 128, 256):
        result.addPixmap(pixmap("kvscope", _INK, size, 1))
    return result


@lru_cache(maxsize=2048)
def pixmap(name: str, color: str, size: int, scale: int = 2) -> QPixmap:
    """One drawing of icon `name`; `scale` device pixels a device-independent pixel. The same for all who ask."""
    renderer = QSvgRenderer(QByteArray(_source(name).replace(_INK, color).encode()))
    result = QPixmap(QSize(size, size) * scale)
    result.fill(Qt.GlobalColor.transparent)
    painter = QPainter(result)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    renderer.render(painter, QRectF(0, 0, size * scale, size * scale))
    painter.end()
    result.setDevicePixelRatio(scale)
    return result


def names() -> list[str]:
    """Names of all icons there are."""
    return sorted(entry.name.removesuffix(".svg") for entry in _FOLDER.iterdir() if entry.name.endswith(".svg"))


def chevron_path(is_dark: bool, where: str = "") -> str:
    """A file for stylesheets, which take no pixmap. `where` it points: down, else `up`, `left` or `right`."""
    return _sheet_path(f"chevron-{where}" if where else "chevron", is_dark)


def check_path(is_dark: bool) -> str:
    """A file for stylesheets: the tick in a box that is filled with the accent."""
    return _sheet_path("check", is_dark)


def _sheet_path(name: str, is_dark: bool) -> str:
    name = f"{name}-on-{'dark' if is_dark else 'light'}.svg"
    with resources.as_file(_FOLDER / name) as path:
        return path.as_posix()


@cache
def _source(name: str) -> str:
    return (_FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def _add(target: QIcon, name: str, color: str, size: int, mode: QIcon.Mode) -> None:
    for scale in _SCALES:
        target.addPixmap(pixmap(name, color, size, scale), mode)
