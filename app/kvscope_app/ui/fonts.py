"""Sans-serif and monospaced fonts. The sans-serif has digits of equal width, so that changing numbers do not shift."""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QFont, QFontMetrics
from PySide6.QtWidgets import QApplication

SANS_FAMILIES: Final = ("Inter", "Noto Sans", "Cantarell", "Ubuntu", "Open Sans", "Segoe UI", "DejaVu Sans")
MONO_FAMILIES: Final = ("JetBrains Mono", "Noto Sans Mono", "Ubuntu Mono", "DejaVu Sans Mono", "monospace")
MIN_POINT_SIZE: Final = 9.0


def apply_fonts(app: QApplication) -> None:
    """Set the application's font family. The size is the system's font size, but at least `MIN_POINT_SIZE`."""
    font = QFont(app.font())
    font.setFamilies([*SANS_FAMILIES, font.family()])
    font.setPointSizeF(max(MIN_POINT_SIZE, font.pointSizeF()))
    app.setFont(tabular(font))


def has_fonts(app: QApplication) -> bool:
    """Whether any font is installed. Without one, Qt draws a box for each letter."""
    return QFontMetrics(app.font()).inFont("a")


def tabular(font: QFont) -> QFont:
    """Return `font` with digits of equal width."""
    result = QFont(font)
    result.setFeature(QFont.Tag("tnum"), 1)
    return result


def sans(scale: float = 1.0, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
    """Return the application's font, with `scale` times its size."""
    font = QFont(QApplication.font())
    font.setPointSizeF(font.pointSizeF() * scale)
    font.setWeight(weight)
    return font


def mono(scale: float = 1.0) -> QFont:
    font = QFont(QApplication.font())
    font.setFamilies(list(MONO_FAMILIES))
    font.setPointSizeF(font.pointSizeF() * scale)
    return font
