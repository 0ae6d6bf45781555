"""Tests that banners, alarm notices and the paused bar lie over the bottom of the map and cover no blocks."""

from __future__ import annotations

from functools import partial

import pytest
from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtWidgets import QApplication, QPushButton

from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import DEFAULT_RULES

LONG = "No block was free for a request that waits, and nothing could be given up for it. " * 4


@pytest.fixture(params=[(1280, 800), (880, 620)], ids=["wide", "small"])
def window(request, engine, session, make_window, poll, qtbot):
    engine.write_blocks([1, 2])
    poll(session)
    made = make_window(session, size=request.param)
    made.page_map.refresh()
    return made


def geometry_around_cells(window):
    """Return the geometries of the map, its buttons and the playback bar."""
    QApplication.processEvents()
    view = window.page_map
    return [part.geometry() for part in (view, view.canvas, window.playback, *view.findChildren(QPushButton))]


def cell_rects(window):
    QApplication.processEvents()
    canvas = window.page_map.canvas
    return [canvas.cell_rect(block) for block in range(canvas.scene.grid.num_blocks)]


def has_wanted_height(strip):
    """Whether the strip is as high as its wrapped text needs; buttons fold one event loop iteration later."""
    wanted = strip.heightForWidth(strip.width())
    return strip.height() == (wanted if wanted >= 0 else strip.sizeHint().height())


def strips_with_triggers(window):
    alarm = Alarm(DEFAULT_RULES[0], epoch=7, begin_ns=1_700_000_000 * 10**9, fired_ns=1_700_000_001 * 10**9, worst=1.0)
    yield (
        "banner",
        lambda: window.banner.show_message("The engine ended", LONG, (("Restart", print), ("Show log", print))),
    )
    yield "alarm_strip", lambda: window.alarms.alarm_started.emit(alarm)
    yield "paused_bar", lambda: window.paused_bar.show()


def test_notice_strip_over_the_page_map_covers_no_block_and_moves_no_other_widget(window, qtbot):
    around, cells_before = geometry_around_cells(window), cell_rects(window)
    canvas = window.page_map.canvas
    for name, show in strips_with_triggers(window):
        show()
        assert geometry_around_cells(window) == around, name
        strip = getattr(window, name)
        qtbot.waitUntil(partial(has_wanted_height, strip))
        top = strip.mapTo(window, QPoint()).y() - canvas.mapTo(window, QPoint()).y()
        assert max(cell.bottom() for cell in cell_rects(window)) < top, name
        assert canvas.map_rect.bottom() < top, name
        strip.hide()
        assert geometry_around_cells(window) == around, name
        assert cell_rects(window) == cells_before, name


def test_map_keeps_its_minimum_height_with_many_strips(window):
    for _, show in strips_with_triggers(window):
        show()
    window.resize(window.minimumSizeHint())
    QApplication.processEvents()
    canvas = window.page_map.canvas
    assert canvas.map_rect.height() >= canvas.minimumHeight()


def test_blocks_covered_by_strips_cannot_be_clicked(window, qtbot):
    canvas = window.page_map.canvas
    canvas.zoom(4.0)
    window.paused_bar.show()
    QApplication.processEvents()
    chosen = []
    canvas.chosen.connect(chosen.append)
    for y in (canvas.map_rect.bottom() + 2, canvas.map_rect.bottom() - 8):
        qtbot.mouseClick(canvas, Qt.MouseButton.LeftButton, pos=QPoint(canvas.width() // 2, y))
    assert len(chosen) == 1


def test_strips_lie_over_the_bottom_of_the_map_without_clipping(window):
    for _, show in strips_with_triggers(window):
        show()
        QApplication.processEvents()
    area = window.page_map.parentWidget()
    canvas = window.page_map.canvas
    below = canvas.mapTo(area, canvas.rect().bottomLeft()).y() + 1
    boxes = []
    for name, _ in strips_with_triggers(window):
        strip = getattr(window, name)
        box = QRect(strip.mapTo(area, strip.rect().topLeft()), strip.size())
        assert area.rect().contains(box), name
        assert strip.height() >= strip.heightForWidth(strip.width()), "the text of the strip is clipped"
        boxes.append(box)
    assert max(box.bottom() for box in boxes) <= below, "strips must not cover the legend and buttons of the map"
    assert not any(one.intersects(other) for one in boxes for other in boxes if one is not other)


def test_banner_is_visible_before_there_is_a_map(session, make_window):
    window = make_window(session)
    window.banner.show_message("The engine stopped before it was ready")
    QApplication.processEvents()
    assert window.banner.visibleRegion().boundingRect().height() == window.banner.height()
