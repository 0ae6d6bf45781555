"""The heatmap's pixels against the page map's colours of the same ledger, and what mouse and keys do."""

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
from kvscope_app.views.page_map.drawing.ink import pixel
from kvscope_telemetry.ledger import BlockState, Ledger, Tier
from kvscope_telemetry.summaries.summary import SECOND_NS


def column_of(view, time_ns):
    """The pixels of the column that the moment is in."""
    return view.map.raster.pixels[:, int(view.frame.scale.x_of(time_ns))]


def cells_of(view, time_ns, num_rows):
    """The pixel in the middle of each row."""
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
    """As the mouse does, but for what the window system adds on its own."""
    at = QPointF(x, y)
    none = Qt.MouseButton.NoButton
    event = QMouseEvent(QEvent.Type.MouseMove, at, widget.mapToGlobal(at), none, none, Qt.KeyboardModifier.NoModifier)
    QApplication.sendEvent(widget, event)


@pytest.fixture
def filled(engine, overview, rng, second, scramble):
    """Twelve seconds of 64 blocks, and the ledger of the last."""
    for index in range(12):
        scramble(engine.ledger, rng)
        overview.extend([second(index, engine.ledger)])
    return engine.ledger


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize(("mode", "same"), [(HeatMode.STATE, STATE), (HeatMode.USED, FILL)], ids=str)
def test_a_column_is_the_page_map(make_engine, overview, make_view, rng, second, scramble, begin_ns, theme, mode, same):
    engine = make_engine(num_blocks=48, num_host=16, num_disk=8)
    ledgers = []
    for index in range(5):
        scramble(engine.ledger, rng)
        overview.extend([second(index, engine.ledger, num_pool=48)])
        expected = page_map_pixels(same, engine.ledger, theme)
        # The overview's shares have 255 steps: colours of used slots are the nearest of theirs.
        ledgers.append(expected)
    view = make_view(engine, overview, theme)
    view.set_mode(mode)
    for index, expected in enumerate(ledgers):
        shown = cells_of(view, begin_ns + index * SECOND_NS + SECOND_NS // 2, 72)
        channels = np.array([shown, expected], np.uint32).view(np.uint8).reshape(2, -1, 4).astype(int)
        assert np.abs(channels[0] - channels[1]).max() <= (0 if mode is HeatMode.STATE else 8)


def test_owners_have_the_page_maps_colours(engine, filled, overview, make_view, begin_ns):
    view = make_view(engine, overview)
    view.set_mode(HeatMode.OWNER)
    shown = cells_of(view, begin_ns + 11 * SECOND_NS, 64)
    expected = page_map_pixels(OWNER, filled, DARK)
    for row, state in enumerate(filled.state.tolist()):
        wanted = expected[row] if state != 2 else pixel(mix(DARK.block_cached, DARK.block_free, 0.62))
        assert shown[row] == wanted


def test_tiers_have_colours(make_engine, overview, make_view, second, begin_ns):
    engine = make_engine(num_blocks=8, num_host=8, num_disk=8)
    engine.ledger.state[::2] = 1
    overview.extend([second(0, engine.ledger, num_pool=8)])
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


def test_one_active_block_among_thousands_is_seen(make_engine, overview, make_view, second, begin_ns):
    engine = make_engine(num_blocks=50_000)
    engine.ledger.state[31_234] = 1
    overview.extend(second(index, engine.ledger) for index in range(3))
    view = make_view(engine, overview)
    column = column_of(view, begin_ns + SECOND_NS)
    others = column != pixel(DARK.block_free)
    assert others.sum() == 1
    assert abs(int(np.flatnonzero(others)[0]) / column.size - 31_234 / 50_000) < 2 / column.size
    assert column[others][0] == pixel(mix(DARK.block_free, DARK.block_active, 0.45))


def test_a_silence_is_hatched_and_what_is_not_yet_is_empty(engine, overview, make_view, second, begin_ns):
    overview.extend(second(index, engine.ledger) for index in (*range(5), *range(15, 20)))
    view = make_view(engine, overview)
    view.frame.set_following(False)
    view.frame.zoom(0.5, 0)
    silent = column_of(view, begin_ns + 10 * SECOND_NS)
    assert pixel(DARK.block_free) not in silent
    assert len(set(silent.tolist())) == 2
    after = column_of(view, begin_ns + 30 * SECOND_NS)
    assert set(after.tolist()) == {pixel(DARK.base)}
    assert "not recorded" in view.legend.accessibleName()


def count_made(view):
    """How many seconds the rows of the map were made of since; what was made before is forgotten."""
    made, keys = [], view.pools.keys
    view.pools.keys = lambda mode, overview, places, num: (made.extend(places), keys(mode, overview, places, num))[1]
    view.set_mode(view.mode)
    return lambda: len(made)


def test_a_second_more_draws_few_columns(make_engine, overview, make_view, second):
    engine = make_engine(num_blocks=2_000)
    overview.extend(second(index, engine.ledger) for index in range(200))
    view = make_view(engine, overview)
    num_made = count_made(view)
    view.frame.set_following(True)
    view.refresh()
    for index in range(200, 210):
        before, made = view.map.raster.num_drawn, num_made()
        engine.ledger.state[index] = 1
        overview.extend([second(index, engine.ledger)])
        view.refresh()
        per_second = SECOND_NS / view.frame.scale.column_ns
        assert num_made() - made == 2
        assert view.map.raster.num_drawn - before <= 2 * per_second + 3
    shown = view.map.raster.pixels.copy()
    view.map.raster.invalidate()
    view.map.redraw()
    assert np.array_equal(view.map.raster.pixels, shown), "scrolled is as drawn at once"


def test_two_hours_are_made_once_and_drawn_by_columns(make_engine, overview, make_view, second):
    engine = make_engine(num_blocks=4_096)
    summary = second(0, engine.ledger)
    overview.extend(
        msgspec.structs.replace(summary, time_ns=summary.time_ns + index * SECOND_NS) for index in range(7_200)
    )
    view = make_view(engine, overview)
    width = view.frame.scale.width
    assert view.map.raster.num_drawn <= 2 * width + 2
    num_made = count_made(view)
    assert num_made() == 7_200
    before = view.map.raster.num_drawn
    view.refresh()
    view.frame.zoom(8, 100)
    assert view.map.raster.num_drawn - before == width
    view.frame.pan(20)
    assert view.map.raster.num_drawn - before == width + 20
    assert num_made() == 7_200


def test_the_wheel_keeps_the_moment_under_the_pointer(engine, filled, overview, make_view):
    view = make_view(engine, overview)
    moment = view.map.time_at(300)
    wheel(view.map, 300, 5)
    assert view.frame.mode is TimeFrameMode.FIXED
    assert abs(view.map.time_at(300) - moment) <= 2 * view.frame.scale.column_ns
    assert not view.fit_button.isChecked()


def test_dragging_moves_and_a_double_click_shows_all(engine, filled, overview, make_view, qtbot):
    view = make_view(engine, overview)
    fitted = view.frame.scale
    qtbot.mousePress(view.map, Qt.MouseButton.LeftButton, pos=QPoint(300, 50))
    qtbot.mouseMove(view.map, QPoint(280, 50))
    qtbot.mouseRelease(view.map, Qt.MouseButton.LeftButton, pos=QPoint(280, 50))
    assert view.frame.scale == fitted.moved(20)
    assert view.session.timeline.cursor_ns == 0, "a drag is no click"
    qtbot.mouseDClick(view.map, Qt.MouseButton.LeftButton, pos=QPoint(280, 50))
    assert view.frame.scale == fitted
    assert view.fit_button.isChecked()


def test_following_keeps_the_newest_at_the_right(engine, filled, overview, make_view, second, begin_ns):
    view = make_view(engine, overview)
    view.follow_button.click()
    overview.extend([second(12, engine.ledger)])
    view.refresh()
    assert 0 <= view.frame.scale.end_ns - (begin_ns + 13 * SECOND_NS) < view.frame.scale.column_ns
    assert view.follow_button.isChecked()
    assert not view.fit_button.isChecked()


def test_the_wheel_zooms_at_the_pointer_while_following(engine, filled, overview, make_view):
    view = make_view(engine, overview)
    view.follow_button.click()
    x = view.map.width() * 0.4
    before = view.map.time_at(x)
    wheel(view.map, x, 3)
    assert abs(view.map.time_at(x) - before) <= view.frame.scale.column_ns
    assert not view.follow_button.isChecked()


def test_a_click_goes_to_how_that_second_ended(engine, filled, overview, make_view, qtbot, begin_ns):
    view = make_view(engine, overview)
    x = round(view.map.x_of(begin_ns + 3 * SECOND_NS + SECOND_NS // 2))
    qtbot.mouseClick(view.map, Qt.MouseButton.LeftButton, pos=QPoint(x, 50))
    assert view.session.timeline.cursor_ns == begin_ns + 4 * SECOND_NS - 1
    image = view.map.grab().toImage()
    line = round(view.map.x_of(view.session.timeline.cursor_ns))
    assert image.pixelColor(line, 20).name() == DARK.selection


def test_hovering_tells_what_is_there(engine, filled, overview, make_view, second, begin_ns):
    filled.state[5], filled.owner[5], filled.filled[5], filled.ref_count[5] = 1, 42, 8, 1
    view = make_view(engine, overview)
    overview.extend([second(12, filled)])
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


def test_a_cell_of_several_blocks_is_named_as_it_is_binned(make_engine, overview, make_view, qtbot, second):
    engine = make_engine(num_blocks=1_500)
    overview.extend([second(0, engine.ledger)])
    view = make_view(engine, overview)
    view.map.setFocus()
    qtbot.keyClick(view.map, Qt.Key.Key_Down)
    names = []
    for _ in range(5):
        names.append(view.caption.text().split("  ·  ")[1])
        qtbot.keyClick(view.map, Qt.Key.Key_Down)
    assert names == ["Block 0", "Block 1", "Block 2 to 3", "Block 4", "Block 5 to 6"]


def test_keys_move_a_cell_and_enter_goes_there(engine, filled, overview, make_view, qtbot, begin_ns):
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


def test_a_larger_pool_after_a_restart(make_engine, overview, make_view, second, begin_ns):
    engine = make_engine(num_blocks=200, epoch=8)
    small = Ledger(100)
    small.state[:] = 1
    overview.extend(second(index, small, epoch=7) for index in range(4))
    overview.extend(second(index, engine.ledger, epoch=8) for index in range(4, 8))
    view = make_view(engine, overview)
    before = cells_of(view, begin_ns + SECOND_NS, 200)
    assert before == [pixel(DARK.block_active)] * 100 + [pixel(DARK.base)] * 100
    assert cells_of(view, begin_ns + 5 * SECOND_NS, 200) == [pixel(DARK.block_free)] * 200


def test_nothing_yet_is_said_in_words(engine, session, overview, make_view, qtbot, second):
    view = make_view(engine, overview)
    assert view.stack.currentIndex() == 0
    assert view.stack.currentWidget().text() == EMPTY_TEXT
    overview.extend([second(0, engine.ledger)])
    view.session.overview_changed.emit()
    assert view.stack.currentIndex() == 1


def test_a_session_without_a_overview_has_nothing_to_show(session, qtbot):
    view = HeatmapView(session)
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert view.stack.currentIndex() == 0


def test_small_docks_keep_the_map(engine, filled, overview, make_view, qtbot):
    view = make_view(engine, overview)
    assert view.runs.isVisible()
    assert view.strips.number.isVisible()
    view.resize(320, 230)
    assert not view.runs.isVisible()
    assert view.map.isVisible()
    qtbot.waitUntil(lambda: view.map.height() >= 90)  # what went leaves it its height
    view.resize(620, 700)
    assert view.runs.raster.pixels.shape[1] == view.frame.scale.width


def test_tiers_of_what_is_known(make_engine, overview, make_view):
    engine = make_engine(num_blocks=6, num_host=2, num_disk=2)
    view = make_view(engine, overview)
    view.pools.record(7, engine.hello.cache)
    assert view.pools.tiers(7, 10).tolist() == [*[Tier.HBM] * 6, *[Tier.HOST] * 2, *[Tier.DISK] * 2]
    assert view.pools.tiers(3, 11).tolist() == [0] * 11


def test_a_cursor_that_moves_has_no_curve_drawn_anew(engine, filled, overview, make_view):
    view = make_view(engine, overview)
    strip, begin_ns = view.strips.external, int(overview.time_ns[0])

    def drawn():
        strip.grab()
        return strip._lines

    before = drawn()
    strip.show_cursor(begin_ns + SECOND_NS)
    assert drawn() is before
    strip.show_values(overview.time_ns, np.full(len(overview.time_ns), 0.25))
    other = drawn()
    assert other[1][1] != before[1][1]
    view.show_range(begin_ns, begin_ns + 2 * SECOND_NS)
    assert drawn()[0] != other[0]


@pytest.mark.parametrize("mode", list(HeatMode))
def test_recurrent_states_have_rows_of_their_own(make_engine, make_view, overview, second, mode):
    engine = make_engine(num_states=6)
    engine.hold([64, 65], owner=3)
    engine.hold([66], owner=2, ref_count=0, state=BlockState.CACHED)
    overview.extend([second(0, engine.ledger, num_pool=64)])
    view = make_view(engine, overview)
    pools = PoolRegistry()
    pools.record(7, engine.hello.cache)
    keys = pools.keys(mode, overview, np.array([0]), 70)
    assert keys.shape == (1, 70)
    assert (keys[0, 64:67] > FREE).all()
    assert (keys[0, 67:] == FREE).all()
    assert view.isVisible()
