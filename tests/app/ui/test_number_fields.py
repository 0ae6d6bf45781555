"""Tests of number fields: both decimal separators are accepted in every locale, and grouping is never guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PySide6.QtCore import QLocale, Qt
from PySide6.QtWidgets import QAbstractSpinBox

import kvscope_app
from kvscope_app.ui.number_fields import (
    NumberBox,
    WholeNumberBox,
    parse_number,
    parse_whole_number,
    with_decimal_point,
)
from kvscope_app.ui.widget_factories import seconds_box


@pytest.fixture(params=["C", "de_DE", "fr_FR", "fa_IR"])
def locale(request):
    before = QLocale()
    QLocale.setDefault(QLocale(request.param))
    yield request.param
    QLocale.setDefault(before)


def type_into(box: QAbstractSpinBox, keys: str, qtbot) -> float:
    qtbot.addWidget(box)
    box.selectAll()
    qtbot.keyClicks(box, keys)
    qtbot.keyClick(box, Qt.Key.Key_Return)
    return box.value()


@pytest.mark.parametrize(
    ("keys", "value"),
    [("2.5", 2.5), ("2,5", 2.5), ("0,5", 0.5), (",5", 0.5), ("1.000", 1.0), ("1,000", 1.0), ("1 000", 1000.0)],
)
def test_number_box_reads_both_separators_in_every_locale(locale, qtbot, keys, value):
    assert type_into(seconds_box(0.1, 5000.0, 3.0, "Rate"), keys, qtbot) == value


@pytest.mark.parametrize(("keys", "value"), [("1.000", 1), ("1,5", 1), ("2 000", 2000), ("2000", 2000)])
def test_whole_number_box_never_reads_a_separator_as_grouping(locale, qtbot, keys, value):
    box = WholeNumberBox()
    box.setRange(1, 1 << 22)
    assert type_into(box, keys, qtbot) == value


def test_decimal_below_the_minimum_is_rejected_and_not_read_without_its_separator(locale, qtbot):
    box = NumberBox()
    box.setRange(10.0, 100.0)
    box.setValue(20.0)
    assert type_into(box, "1,5", qtbot) == 20.0


def test_whole_number_box_shows_grouped_digits_suffix_and_the_special_text_for_zero(locale, qtbot):
    box = WholeNumberBox()
    qtbot.addWidget(box)
    box.setRange(0, 1 << 22)
    box.setSuffix(" MiB")
    box.setValue(8192)
    assert box.text() == "8\u202f192 MiB"
    box.setSpecialValueText("no limit")
    box.setValue(0)
    assert box.text() == "no limit"
    box.interpretText()
    assert box.value() == 0


def test_numbers_in_line_edits_are_plain_decimals_with_either_separator():
    assert [parse_number(text) for text in ("1,5", "1.5", " −2 ", "1e-3", "۱٫۵")] == [1.5, 1.5, -2.0, 1e-3, 1.5]
    assert [parse_number(text) for text in ("", ".", "1.000,5", "nan", "0x10", "1_0")] == [None] * 6
    assert parse_whole_number(str((1 << 63) - 1)) == (1 << 63) - 1
    assert [parse_whole_number(text) for text in ("1.000", "1,5", "x")] == [1, None, None]
    assert with_decimal_point("22,5GiB") == "22.5GiB"


def test_desktop_uses_no_plain_qt_spin_boxes():
    app = Path(kvscope_app.__file__).parent
    users = {
        path.name
        for path in app.rglob("*.py")
        if re.search(r"\bQ(Double)?SpinBox\(|getDouble|DoubleInput", path.read_text())
    }
    assert users == set()
