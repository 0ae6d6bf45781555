"""Tests of the event table: columns or cards, tooltips, selection and filters."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from kvscope_app.session.event_log import EventLog
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.events.event_entries import WHY, why_text
from kvscope_app.views.events.event_model import EventFilter, EventModel
from kvscope_app.views.events.event_table import NARROW, EventTable
from kvscope_telemetry.messages.telemetry import Event

EPOCH = 4_812_049_538_478_226_247
"""Random epoch of 63 bits, as of a real engine."""
LONG = "request 49 needed 1 block and none could be had; " * 8


@pytest.fixture
def log():
    made = EventLog(100)
    made.extend([Event(kind="preempted", time_ns=1, number=51, other=49, cause=LONG)], EPOCH, 0)
    made.extend([Event(kind="evicted", time_ns=2, cause="1 cached, unused for longest")], EPOCH, 0)
    return made


@pytest.fixture
def table(log, qtbot):
    model = EventModel(0)
    model.append_new(log)
    made = EventTable(model, "Events")
    qtbot.addWidget(made)
    made.resize(NARROW + 100, 300)
    made.show()
    return made


def test_narrow_event_table_shows_cards(table, qtbot):
    low = table.rowHeight(0)
    assert not table.isColumnHidden(0)
    table.resize(300, 300)
    assert [table.isColumnHidden(column) for column in range(4)] == [True, True, True, False]
    assert not table.horizontalHeader().isVisible()
    line = table.fontMetrics().height()
    assert table.rowHeight(1) >= 5 * line, "a long reason takes the maximum number of lines"
    assert 2 * line <= table.rowHeight(0) < 4 * line, "a short reason takes only the lines it needs"
    qtbot.waitUntil(lambda: not table.horizontalScrollBar().isVisible())
    table.resize(NARROW + 100, 300)
    assert table.rowHeight(0) == low
    assert not table.isColumnHidden(0)


def test_event_cards_scrolled_into_view_are_high_enough_for_their_text(table, log):
    table.resize(300, 300)
    log.extend([Event(kind="evicted", time_ns=3 + n, cause=f"{n} cached") for n in range(90)], EPOCH, 0)
    table.model().append_new(log)
    short = table.rowHeight(0)
    assert short == table.rowHeight(1) < 4 * table.fontMetrics().height()
    bar = table.verticalScrollBar()
    table.updateGeometries()
    bar.setValue(50)
    assert table.rowAt(0) == 50
    assert table.rowHeight(50) == short
    table.resize(NARROW + 100, 300)
    assert table.rowHeight(table.rowAt(0)) < short, "with columns, a row is one line high"


def test_larger_font_makes_cards_higher(table):
    table.resize(300, 300)
    before = table.rowHeight(1)
    font = table.font()
    font.setPointSizeF(2 * font.pointSizeF())
    table.setFont(font)
    assert table.rowHeight(1) > 1.5 * before


@pytest.mark.parametrize("theme", list(THEMES.values()))
def test_card_text_wraps_and_stays_inside_the_card(table, theme):
    table.model().theme = theme
    table.resize(300, 300)
    image = table.viewport().grab().toImage()
    ink = theme.color("text")
    line = table.fontMetrics().height()
    top, bottom = table.rowViewportPosition(1), table.rowViewportPosition(1) + table.rowHeight(1)
    inked = [
        (x, (y - top) // line)
        for y in range(top, bottom)
        for x in range(image.width())
        if image.pixelColor(x, y) == ink
    ]
    assert len({line for _, line in inked}) >= 4
    assert max(x for x, _ in inked) < 294


def test_tooltip_contains_the_whole_reason_and_wraps(table):
    tip = table.model().index(1, WHY).data(Qt.ItemDataRole.ToolTipRole)
    assert tip == f"<p>{LONG}</p>"


def test_clicked_event_emits_its_request_number_with_an_uncut_63_bit_epoch(table, qtbot):
    with qtbot.waitSignal(table.request_chosen) as signal:
        table.clicked.emit(table.model().index(1, WHY))
    assert signal.args == [EPOCH, 51]


def test_evictions_can_be_filtered_out(table, log):
    table.model().show_only(EventFilter.REQUESTS, log)
    assert [table.model().index(row, 1).data() for row in range(table.model().rowCount())] == ["preempted"]


def test_reason_text_does_not_repeat_figures_of_the_cause():
    event = Event(kind="preempted", time_ns=0, cause="365 tokens in 23 blocks moved", num_blocks=23, num_tokens=365)
    assert why_text(event) == "365 tokens in 23 blocks moved"
    assert why_text(Event(kind="finished", time_ns=0, cause="after 24", num_blocks=2)) == "after 24 · 2 blocks"
