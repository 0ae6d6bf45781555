"""Parsing of typed numbers, and spin boxes, with the same rules for every field and locale.

Both "." and "," are decimal separators and never group digits: "2,5" and "2.5" are 2.5, and "1.000" is 1. Spaces group
digits, as in `number_text.count`.
"""

from __future__ import annotations

import math
import re
from typing import Final

from PySide6.QtCore import QLocale
from PySide6.QtGui import QValidator
from PySide6.QtWidgets import QDoubleSpinBox, QSpinBox, QWidget

from kvscope_app.ui.number_text import count

_TO_ASCII: Final = str.maketrans(
    ",٫−", "..-"
)  # Persian and Arabic keyboards type U+066B; U+2212 is a typographic minus
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WHOLE_NUMBER: Final = re.compile(r"([+-]?\d+)(\.0*)?")
_PARTIAL_NUMBER: Final = re.compile(r"[+-]?\d*(?:\.(\d*))?")


def parse_number(text: str) -> float | None:
    """Return the number in `text`, or None if it is not a plain decimal number."""
    normalized = _normalized(text)
    return float(normalized) if _NUMBER.fullmatch(normalized) else None


def parse_whole_number(text: str) -> int | None:
    """Return the whole number in `text`, without rounding, or None if it is not one."""
    match = _WHOLE_NUMBER.fullmatch(_normalized(text))
    return int(match[1]) if match else None


def with_decimal_point(text: str) -> str:
    """Return `text` with commas between digits replaced by points, for options such as `22,5GiB`."""
    return re.sub(r"(?<=\d)[,٫](?=\d)", ".", text)


class NumberBox(QDoubleSpinBox):
    """Spin box for a decimal number, with "." as the decimal separator."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setLocale(QLocale.c())
        _indent(self)

    def validate(self, text: str, pos: int) -> tuple[QValidator.State, str, int]:
        return _validation_state(self, text, self.decimals()), text, pos

    def valueFromText(self, text: str) -> float:
        value = parse_number(_without_affixes(self, text))
        return self.value() if value is None else value

    def textFromValue(self, value: float) -> str:
        return f"{value:.{self.decimals()}f}"

    def fixup(self, text: str) -> str:
        """Return an incomplete number unchanged. Qt would remove commas as grouping and turn "1,5" into 15."""
        return text


class WholeNumberBox(QSpinBox):
    """Spin box for a whole number, with its digits grouped by narrow spaces."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setLocale(QLocale.c())
        _indent(self)

    def validate(self, text: str, pos: int) -> tuple[QValidator.State, str, int]:
        return _validation_state(self, text, 0), text, pos

    def valueFromText(self, text: str) -> int:
        value = parse_whole_number(_without_affixes(self, text))
        return self.value() if value is None else value

    def textFromValue(self, value: int) -> str:
        return count(value)

    def fixup(self, text: str) -> str:
        return text


def _validation_state(box: QSpinBox | QDoubleSpinBox, text: str, num_decimals: int) -> QValidator.State:
    """Return whether `text` is a number in the box's range (Acceptable), may become one (Intermediate), or neither."""
    bare = _without_affixes(box, text)
    if box.specialValueText() and bare == box.specialValueText():
        return QValidator.State.Acceptable
    typed = _PARTIAL_NUMBER.fullmatch(_normalized(bare))
    # A separator is accepted in a whole number too, followed by zeros: if it were ignored, "1.5" would become 15.
    if typed is None or (typed[1] or "")[num_decimals:].strip("0"):
        return QValidator.State.Invalid
    value = parse_number(bare)
    if value is None:
        return QValidator.State.Intermediate
    if not math.isfinite(value) or value > max(box.maximum(), 0) or value < min(box.minimum(), 0):
        return QValidator.State.Invalid
    is_inside = box.minimum() <= value <= box.maximum()
    return QValidator.State.Acceptable if is_inside else QValidator.State.Intermediate


def _without_affixes(box: QSpinBox | QDoubleSpinBox, text: str) -> str:
    return text.removeprefix(box.prefix()).removesuffix(box.suffix()).strip()


def _normalized(text: str) -> str:
    return "".join(text.split()).translate(_TO_ASCII)


def _indent(box: QSpinBox | QDoubleSpinBox) -> None:
    """Indent the text as in a line edit, because the stylesheet's padding does not apply inside a spin box."""
    box.lineEdit().setTextMargins(7, 0, 0, 0)
