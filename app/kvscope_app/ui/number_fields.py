"""Spin boxes and a parser for typed numbers, with the same rules for every field and locale.

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

_COMMAS: Final = str.maketrans(",٫−", "..-")  # Persian and Arabic keyboards type U+066B; U+2212 is a typographic minus
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WHOLE: Final = re.compile(r"([+-]?\d+)(\.0*)?")
_BEGINNING: Final = re.compile(r"[+-]?\d*(?:\.(\d*))?")


def parse_number(text: str) -> float | None:
    """Return the number in `text`, or None if it is not a plain decimal number."""
    plain = _plain(text)
    return float(plain) if _NUMBER.fullmatch(plain) else None


def parse_whole_number(text: str) -> int | None:
    """Return the whole number in `text`, with all its digits, or None if it is not one."""
    found = _WHOLE.fullmatch(_plain(text))
    return int(found[1]) if found else None


def with_decimal_point(text: str) -> str:
    """Return `text` with commas between digits replaced by points, for options such as `22,5GiB`."""
    return re.sub(r"(?<=\d)[,٫](?=\d)", ".", text)


class NumberBox(QDoubleSpinBox):
    """Spin box for a decimal number, formatted with a point like all other numbers of the window."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setLocale(QLocale.c())
        _indent(self)

    def validate(self, text: str, pos: int) -> tuple[QValidator.State, str, int]:
        return _state(self, text, self.decimals()), text, pos

    def valueFromText(self, text: str) -> float:
        value = parse_number(_without_affixes(self, text))
        return self.value() if value is None else value

    def textFromValue(self, value: float) -> str:
        return f"{value:.{self.decimals()}f}"

    def fixup(self, text: str) -> str:
        """Return an incomplete number unchanged: Qt would remove commas as grouping and turn "1,5" into 15."""
        return text


class WholeNumberBox(QSpinBox):
    """Spin box for a whole number, with its digits grouped by narrow spaces."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setLocale(QLocale.c())
        _indent(self)

    def validate(self, text: str, pos: int) -> tuple[QValidator.State, str, int]:
        return _state(self, text, 0), text, pos

    def valueFromText(self, text: str) -> int:
        value = parse_whole_number(_without_affixes(self, text))
        return self.value() if value is None else value

    def textFromValue(self, value: int) -> str:
        return count(value)

    def fixup(self, text: str) -> str:
        """Leave an incomplete number as it is; see `NumberBox.fixup`."""
        return text


def _state(box: QSpinBox | QDoubleSpinBox, text: str, num_decimals: int) -> QValidator.State:
    """Return whether `text` is a number in the box's range, may become one by further typing, or neither."""
    bare = _without_affixes(box, text)
    if box.specialValueText() and bare == box.specialValueText():
        return QValidator.State.Acceptable
    typed = _BEGINNING.fullmatch(_plain(bare))
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


def _plain(text: str) -> str:
    """Return `text` in the notation that `float` accepts."""
    return "".join(text.split()).translate(_COMMAS)


def _indent(box: QSpinBox | QDoubleSpinBox) -> None:
    """Indent the text as in a line edit, because the stylesheet's padding does not apply inside a spin box."""
    box.lineEdit().setTextMargins(7, 0, 0, 0)
