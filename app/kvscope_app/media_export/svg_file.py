"""QPainter that draws SVG.

Corrects what is wrong in QSvgGenerator's output: smoothed images, a size in mm, and unescaped control characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from PySide6.QtCore import QBuffer, QByteArray, QIODevice, QRect, QSize
from PySide6.QtGui import QPainter
from PySide6.QtSvg import QSvgGenerator

from kvscope_telemetry.printable import xml_text

_DPI: Final = 96
_PIXELATED_IMAGE: Final = b'<image style="image-rendering:pixelated" '
"""Start of an image tag without smoothing, so that cells stay sharp where the drawing is enlarged."""
_MILLIMETRES: Final = re.compile(rb'<svg width="[\d.]+mm" height="[\d.]+mm"')


@contextmanager
def svg_painter(size: QSize, title: str) -> Iterator[tuple[QPainter, Callable[[], QByteArray]]]:
    """Yield a painter for a drawing of `size`, and a function that returns the SVG file once the context is closed."""
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    generator = QSvgGenerator()
    generator.setOutputDevice(buffer)
    generator.setSize(size)
    generator.setViewBox(QRect(0, 0, size.width(), size.height()))
    generator.setResolution(_DPI)
    generator.setTitle(f"kvscope: {title}")
    painter = QPainter(generator)

    def to_bytes() -> QByteArray:
        svg = bytes(buffer.data().data()).replace(b"<image ", _PIXELATED_IMAGE)
        in_pixels = f'<svg width="{size.width()}" height="{size.height()}"'.encode()
        resized = _MILLIMETRES.sub(in_pixels, svg, count=1)
        return QByteArray(xml_text(resized.decode()).encode())  # Qt does not escape control characters in texts

    try:
        yield painter, to_bytes
    finally:
        painter.end()
