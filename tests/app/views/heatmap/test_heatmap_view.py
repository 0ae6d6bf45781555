"""Tests of the heatmap view: pixels compared with page map colours, time axis, mouse and keyboard."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QMouseEvent, QWheelEvent
from PySide6.QtWidgets import QApplication

from kvscope_app.ui.theme import DARK, LIGHT, mix
from kvscope_app.views.heatmap.cell_keys import FREE, HeatMode
from kvscope_app.views.heatmap.cell_text import cell_text
from kvscope_app.views.heatmap.heatmap_view import EMPTY_TEXT, HeatmapView
from kvscope_app.views.heatmap.pools import PoolRegistry
from kvscope_app.views.heatmap.time_frame import TimeFrameMode
from kvscope_app.views.page_map.color_modes import FILL, OWNER, STATE
from kvscope_app.views.page_map.drawing.pixel_tables import pixel
from kvscope_telemetry.ledger import BlockState, Ledger, Tier
from kvscope_telemetry.summaries.summary import SECOND_NS


def column_of(view, time_ns):
    """Return the pixels of the column at a time."""
    return view.map.raster.pixels[:, int(view.frame.scale.x_of(time_ns))]


def cells_of(view, time_ns, num_rows):
    """Return the pixel in the middle of each row."""
    column = column_of(view, time_ns)
    return column[((np.arange(num_rows) + 0.5) * column.size / num_rows).astype(int)].tolist()


def page_map_pixels(mode, ledger, theme):
    colors = mode.key_colors(theme)
    return [pixel(colors[key]) for key in mode.keys(ledger, slice(None), 16, 0)]


def wheel(widget, x, steps):
    at = QPointF(x, 40)
    event = QWheelEvent(
        at,
        QPointF(widget.mapToGlobal(at.toPoint())),
        QPoint(),
        QPoint(0, 120 * steps),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(widget, event)


def hover(widget, x, y):
    """Move the mouse without the events that a window system would add."""
    at = QPointF(x, y)
    none = Qt.MouseButton.NoButton
    event = QMouseEvent(QEvent.Type.MouseMove, at, widget.mapToGlobal(at), none, none, Qt.KeyboardModifier.NoModifier)
    QApplication.sendEvent(widget, event)


@pytest.fixture
def filled_ledger(engine, overview, rng, make_summary, scramble):
    """Ledger of the last of twelve recorded seconds with 64 blocks."""
    for index in range(12):
        scramble(engine.ledger, rng)
        overview.extend([make_summary(index, engine.ledger)])
    return engine.ledger


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize(("mode", "same"), [(HeatMode.STATE, STATE), (HeatMode.USED, FILL)], ids=str)
def test_heatmap_column_has_the_colors_of_the_page_map(
    make_engine, overview, make_view, rng, make_summary, scramble, begin_ns, theme, mode, same
):
    engine = make_engine(num_blocks=48, num_host=16, num_disk=8)
    ledgers = []
    for index in range(5):
        scramble(engine.ledger, rng)
        overview.extend([make_summary(index, engine.ledger, num_pool=48)])
        expected = page_map_pixels(same, engine.ledger, theme)
        # The overview's shares have 255 steps, so colours of used slots may differ slightly.
        ledgers.append(expected)
    view = make_view(engine, overview, theme)
    view.set_mode(mode)
    for index, expected in enumerate(ledgers):
        shown = cells_of(view, begin_ns + index * SECOND_NS + SECOND_NS // 2, 72)
        channels = np.array([shown, expected], np.uint32).view(np.uint8).reshape(2, -1, 4).astype(int)
        assert np.abs(channels[0] - channels[1]).max() <= (0 if mode is HeatMode.STATE else 8)


def test_owner_mode_has_the_colors_of_the_page_map(engine, filled_ledger, overview, make_view, begin_ns):
    view = make_view(engine, overview)
    view.set_mode(HeatMode.OWNER)
    shown = cells_of(view, begin_ns + 11 * SECOND_NS, 64)
    expected = page_map_pixels(OWNER, filled_ledger, DARK)
    for row, state in enumerate(filled_ledger.state.tolist()):
        wanted = expected[row] if state != 2 else pixel(mix(DARK.block_cached, DARK.block_free, 0.62))
        assert shown[row] == wanted


def test_tier_mode_has_a_color_and_label_per_tier(make_engine, overview, make_view, make_summary, begin_ns):
    engine = make_engine(num_blocks=8, num_host=8, num_disk=8)
    engine.ledger.state[::2] = 1
    overview.extend([make_summary(0, engine.ledger, num_pool=8)])
    view = make_view(engine, overview)
    view.set_mode(HeatMode.TIER)
    colors = [DARK.block_active, DARK.block_host, DARK.block_disk]
    wanted = [pixel(DARK.block_free if row % 2 else colors[row // 8]) for row in range(24)]
    assert cells_of(view, begin_ns, 24) == wanted
    assert [(label.text, label.line) for label in view.map.labels] == [
        ("Memory", False),
        ("Host memory", True),
        ("Disk", True),
    ]


def test_single_active_block_among_thousands_is_visible(make_engine, overview, make_view, make_summary, begin_ns):
    engine = make_engine(num_blocks=50_000)
    engine.ledger.state[31_234] = 1
    overview.extend(make_summary(index, engine.ledger) for index in range(3))
    view = make_view(engine, overview)
    column = column_of(view, begin_ns + SECOND_NS)
    others = column != pixel(DARK.block_free)
    assert others.sum() == 1
    assert abs(int(np.flatnonzero(others)[0]) / column.size - 31_234 / 50_000) < 2 / column.size
    assert column[others][0] == pixel(mix(DARK.block_free, DARK.block_active, 0.45))


def test_missing_seconds_are_hatched_and_future_ones_empty(engine, overview, make_view, make_summary, begin_ns):
    overview.extend(make_summary(index, engine.ledger) for index in (*range(5), *range(15, 20)))
    view = make_view(engine, overview)
    view.frame.set_following(False)
    view.frame.zoom(0.5, 0)
    silent = column_of(view, begin_ns + 10 * SECOND_NS)
    assert pixel(DARK.block_free) not in silent
    assert len(set(silent.tolist())) == 2
    after = column_of(view, begin_ns + 30 * SECOND_NS)
    assert set(after.tolist()) == {pixel(DARK.base)}
    assert "not recorded" in view.legend.accessibleName()


def count_converted_seconds(view):
    """Return a function that returns the number of seconds converted to keys since this call."""
    made, keys = [], view.pools.keys
    view.pools.keys = lambda mode, overview, places, num: (made.extend(places), keys(mode, overview, places, num))[1]
    view.set_mode(view.mode)
    return lambda: len(made)


def test_new_second_redraws_only_the_newest_heatmap_columns(make_engine, overview, make_view, make_summary):
    engine = make_engine(num_blocks=2_000)
    overview.extend(make_summary(index, engine.ledger) for index in range(200))
    view = make_view(engine, overview)
    num_made = count_converted_seconds(view)
    view.frame.set_following(True)
    view.refresh()
    for index in range(200, 210):
        before, made = view.map.raster.num_drawn, num_made()
        engine.ledger.state[index] = 1
        overview.extend([make_summary(index, engine.ledger)])
        view.refresh()
        per_second = SECOND_NS / view.frame.scale.column_ns
        assert num_made() - made == 2
        assert view.map.raster.num_drawn - before <= 2 * per_second + 3
    shown = view.map.raster.pixels.copy()
    view.map.raster.invalidate()
    view.map.redraw()
    assert np.array_equal(view.map.raster.pixels, shown), "scrolled pixels must equal freshly drawn ones"


def test_long_overview_is_converted_once_and_drawn_by_columns(make_engine, overview, make_view, make_summary):
    engine = make_engine(num_blocks=4_096)
    summary = make_summary(0, engine.ledger)
    overview.extend(
        msgspec.structs.replace(summary, time_ns=summary.time_ns + index * SECOND_NS) for index in range(7_200)
    )
    view = make_view(engine, overview)
    width = view.frame.scale.width
    assert view.map.raster.num_drawn <= 2 * width + 2
    num_made = count_converted_seconds(view)
    assert num_made() == 7_200
    before = view.map.raster.num_drawn
    view.refresh()
    view.frame.zoom(8, 100)
    assert view.map.raster.num_drawn - before == width
    view.frame.pan(20)
    assert view.map.raster.num_drawn - before == width + 20
    assert num_made() == 7_200


def test_wheel_zoom_keeps_the_time_under_the_pointer(engine, filled_ledger, overview, make_view):
    view = make_view(engine, overview)
    moment = view.map.time_at(300)
    wheel(view.map, 300, 5)
    assert view.frame.mode is TimeFrameMode.FIXED
    assert abs(view.map.time_at(300) - moment) <= 2 * view.frame.scale.column_ns
    assert not view.fit_button.isChecked()


def test_dragging_pans_the_heatmap_and_a_double_click_shows_its_whole_range(
    engine, filled_ledger, overview, make_view, qtbot
):
    view = make_view(engine, overview)
    fitted = view.frame.scale
    qtbot.mousePress(view.map, Qt.MouseButton.LeftButton, pos=QPoint(300, 50))
    qtbot.mouseMove(view.map, QPoint(280, 50))
    qtbot.mouseRelease(view.map, Qt.MouseButton.LeftButton, pos=QPoint(280, 50))
    assert view.frame.scale == fitted.moved(20)
    assert view.session.timeline.cursor_ns == 0, "a drag must not seek"
    qtbot.mouseDClick(view.map, Qt.MouseButton.LeftButton, pos=QPoint(280, 50))
    assert view.frame.scale == fitted
    assert view.fit_button.isChecked()


def test_following_heatmap_keeps_the_newest_second_at_its_right_edge(
    engine, filled_ledger, overview, make_view, make_summary, begin_ns
):
    view = make_view(engine, overview)
    view.follow_button.click()
    overview.extend([make_summary(12, engine.ledger)])
    view.refresh()
    assert 0 <= view.frame.scale.end_ns - (begin_ns + 13 * SECOND_NS) < view.frame.scale.column_ns
    assert view.follow_button.isChecked()
    assert not view.fit_button.isChecked()


def test_wheel_zoom_at_the_pointer_ends_following(engine, filled_ledger, overview, make_view):
    view = make_view(engine, overview)
    view.follow_button.click()
    x = view.map.width() * 0.4
    before = view.map.time_at(x)
    wheel(view.map, x, 3)
    assert abs(view.map.time_at(x) - before) <= view.frame.scale.column_ns
    assert not view.follow_button.isChecked()


def test_click_in_the_heatmap_seeks_to_the_end_of_the_clicked_second(
    engine, filled_ledger, overview, make_view, qtbot, begin_ns
):
    view = make_view(engine, overview)
    x = round(view.map.x_of(begin_ns + 3 * SECOND_NS + SECOND_NS // 2))
    qtbot.mouseClick(view.map, Qt.MouseButton.LeftButton, pos=QPoint(x, 50))
    assert view.session.timeline.cursor_ns == begin_ns + 4 * SECOND_NS - 1
    image = view.map.grab().toImage()
    line = round(view.map.x_of(view.session.timeline.cursor_ns))
    assert image.pixelColor(line, 20).name() == DARK.selection


def test_hovering_over_the_heatmap_describes_block_state_fill_and_request(
    engine, filled_ledger, overview, make_view, make_summary, begin_ns
):
    filled_ledger.state[5], filled_ledger.owner[5], filled_ledger.filled[5], filled_ledger.ref_count[5] = 1, 42, 8, 1
    view = make_view(engine, overview)
    overview.extend([make_summary(12, filled_ledger)])
    view.refresh()
    x = round(view.map.x_of(begin_ns + 12 * SECOND_NS + SECOND_NS // 2))
    y = round(5.5 * view.map.height() / 64)
    hover(view.map, x, y)
    words = view.caption.text()
    assert words == cell_text(overview, view.pools, begin_ns + 12 * SECOND_NS + SECOND_NS // 2, 5)
    assert "Block 5" in words
    assert "active" in words
    assert "50 % of slots used" in words
    assert "request #42" in words


def test_heatmap_caption_names_the_range_of_blocks_that_a_cell_covers(
    make_engine, overview, make_view, qtbot, make_summary
):
    engine = make_engine(num_blocks=1_500)
    overview.extend([make_summary(0, engine.ledger)])
    view = make_view(engine, overview)
    view.map.setFocus()
    qtbot.keyClick(view.map, Qt.Key.Key_Down)
    names = []
    for _ in range(5):
        names.append(view.caption.text().split("  ·  ")[1])
        qtbot.keyClick(view.map, Qt.Key.Key_Down)
    assert names == ["Block 0", "Block 1", "Block 2 to 3", "Block 4", "Block 5 to 6"]


def test_arrow_keys_move_the_heatmap_cell_cursor_and_enter_seeks_to_its_time(
    engine, filled_ledger, overview, make_view, qtbot, begin_ns
):
    view = make_view(engine, overview)
    view.activateWindow()
    view.map.setFocus()
    view.session.timeline.go_to(begin_ns + 3 * SECOND_NS)
    view.refresh()
    qtbot.keyClick(view.map, Qt.Key.Key_Right)
    assert view.map.cell.time_ns // SECOND_NS == begin_ns // SECOND_NS + 3
    qtbot.keyClick(view.map, Qt.Key.Key_Right)
    qtbot.keyClick(view.map, Qt.Key.Key_Down)
    assert view.map.cell.time_ns // SECOND_NS == begin_ns // SECOND_NS + 4
    assert view.map.cell.row == 1
    assert "Block 1 " in view.caption.text()
    qtbot.keyClick(view.map, Qt.Key.Key_Return)
    assert view.session.timeline.cursor_ns == begin_ns + 5 * SECOND_NS - 1
    view.map.zoom_by(1)
    assert view.frame.mode is TimeFrameMode.FIXED
    view.map.zoom_by(0)
    assert view.frame.mode is TimeFrameMode.FIT
    qtbot.keyClick(view.map, Qt.Key.Key_Escape)
    assert view.map.cell is None


def test_heatmap_rows_beyond_a_smaller_pool_of_an_earlier_engine_run_are_empty(
    make_engine, overview, make_view, make_summary, begin_ns
):
    engine = make_engine(num_blocks=200, epoch=8)
    small = Ledger(100)
    small.state[:] = 1
    overview.extend(make_summary(index, small, epoch=7) for index in range(4))
    overview.extend(make_summary(index, engine.ledger, epoch=8) for index in range(4, 8))
    view = make_view(engine, overview)
    before = cells_of(view, begin_ns + SECOND_NS, 200)
    assert before == [pixel(DARK.block_active)] * 100 + [pixel(DARK.base)] * 100
    assert cells_of(view, begin_ns + 5 * SECOND_NS, 200) == [pixel(DARK.block_free)] * 200


def test_heatmap_without_a_history_shows_an_explanation(engine, session, overview, make_view, qtbot, make_summary):
    view = make_view(engine, overview)
    assert view.stack.currentIndex() == 0
    assert view.stack.currentWidget().text() == EMPTY_TEXT
    overview.extend([make_summary(0, engine.ledger)])
    view.session.overview_changed.emit()
    assert view.stack.currentIndex() == 1


def test_session_without_an_overview_shows_the_explanation(session, qtbot):
    view = HeatmapView(session)
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert view.stack.currentIndex() == 0


def test_small_heatmap_view_hides_the_extra_charts_but_keeps_the_map(engine, filled_ledger, overview, make_view, qtbot):
    view = make_view(engine, overview)
    assert view.runs.isVisible()
    assert view.strips.number.isVisible()
    view.resize(320, 230)
    assert not view.runs.isVisible()
    assert view.map.isVisible()
    qtbot.waitUntil(lambda: view.map.height() >= 90)  # the map takes the height of the hidden parts
    view.resize(620, 700)
    assert view.runs.raster.pixels.shape[1] == view.frame.scale.width


def test_heatmap_knows_tiers_only_for_engine_starts_whose_pool_was_recorded(make_engine, overview, make_view):
    engine = make_engine(num_blocks=6, num_host=2, num_disk=2)
    view = make_view(engine, overview)
    view.pools.record(7, engine.hello.cache)
    assert view.pools.tiers(7, 10).tolist() == [*[Tier.HBM] * 6, *[Tier.HOST] * 2, *[Tier.DISK] * 2]
    assert view.pools.tiers(3, 11).tolist() == [0] * 11


def test_moving_the_time_cursor_does_not_redraw_the_curves_beside_the_heatmap(
    engine, filled_ledger, overview, make_view
):
    view = make_view(engine, overview)
    strip, begin_ns = view.strips.external, int(overview.time_ns[0])

    def drawn():
        strip.grab()
        return strip._cached_curve

    before = drawn()
    strip.show_cursor(begin_ns + SECOND_NS)
    assert drawn() is before
    strip.show_values(overview.time_ns, np.full(len(overview.time_ns), 0.25))
    other = drawn()
    assert other[1][1] != before[1][1]
    view.show_range(begin_ns, begin_ns + 2 * SECOND_NS)
    assert drawn()[0] != other[0]


@pytest.mark.parametrize("mode", list(HeatMode))
def test_recurrent_states_have_separate_rows(make_engine, make_view, overview, make_summary, mode):
    engine = make_engine(num_states=6)
    engine.write_blocks([64, 65], owner=3)
    engine.write_blocks([66], owner=2, ref_count=0, state=BlockState.CACHED)
    overview.extend([make_summary(0, engine.ledger, num_pool=64)])
    view = make_view(engine, overview)
    pools = PoolRegistry()
    pools.record(7, engine.hello.cache)
    keys = pools.keys(mode, overview, np.array([0]), 70)
    assert keys.shape == (1, 70)
    assert (keys[0, 64:67] > FREE).all()
    assert (keys[0, 67:] == FREE).all()
    assert view.isVisible()
