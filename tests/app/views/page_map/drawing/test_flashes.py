"""Tests of flashes: each kind of move has its colour and symbol, fades, and the number is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.ui.theme import DARK, LIGHT, THEMES
from kvscope_app.views.page_map.drawing.cells import CellShape
from kvscope_app.views.page_map.drawing.flash_glyphs import MIN_PITCH_FOR_GLYPH, glyph
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES, FlashKind, level_below, top_level
from kvscope_app.views.page_map.drawing.flashes import MAX_MOVES_AT_ONCE, Flashes
from kvscope_app.views.page_map.drawing.pixel_tables import PixelTables, pixel
from kvscope_app.views.page_map.drawing.scene import Scene
from kvscope_app.views.page_map.page_map_view import PageMapView, PendingMoves
from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.source import Update

MS = 1_000_000
NOW = 10_000 * MS


def ids_of(*blocks):
    return np.array(blocks, np.uint32)


@pytest.fixture
def flashing_scene():
    """Scene of 200 active blocks with flashes on."""
    scene = Scene()
    scene.resize(640, 400)
    ledger = Ledger(200)
    ledger.state[:], ledger.filled[:] = BlockState.ACTIVE, 16
    scene.set_ledger(ledger, 16, 1)
    return scene


def cell_pixels(scene, block):
    x, y = (int(v) for v in scene.camera.corner_of(*scene.grid.position_of(block)))
    pitch = int(scene.camera.pitch)
    return scene.pixels[y : y + pitch, x : x + pitch]


@pytest.mark.parametrize("kind", MOVES)
def test_move_flashes_in_its_color_with_its_symbol_and_fades(flashing_scene, kind):
    before = flashing_scene.pixels.copy()
    flashing_scene.flash(kind, ids_of(9), NOW)
    tables = PixelTables(flashing_scene.mode, DARK)
    tinted = tables.solid[0, top_level(kind), flashing_scene.cells.ranks_of(ids_of(9))[0]]
    shown = cell_pixels(flashing_scene, 9)
    assert (shown == tinted).sum() > 20
    assert (shown[5:-5, 5:-5] == tables.glyphs[kind]).sum() > 4
    assert (cell_pixels(flashing_scene, 10) == cell_pixels(flashing_scene, 8)).all()
    flashing_scene.fade(NOW + 300 * MS)
    assert flashing_scene.is_fading
    assert not (cell_pixels(flashing_scene, 9) == tinted).any()
    flashing_scene.fade(NOW + 600 * MS)
    assert not flashing_scene.is_fading
    np.testing.assert_array_equal(flashing_scene.pixels, before)


def test_block_change_does_not_replace_the_flash_of_an_eviction(flashing_scene):
    flashing_scene.flash(FlashKind.EVICTED, ids_of(9), NOW)
    evicted = cell_pixels(flashing_scene, 9).copy()
    flashing_scene.change(ids_of(9, 10), 2, NOW + 16 * MS)
    np.testing.assert_array_equal(cell_pixels(flashing_scene, 9), evicted)
    assert (cell_pixels(flashing_scene, 10) != evicted).any()
    flashing_scene.fade(NOW + 300 * MS)
    flashing_scene.fade(NOW + 600 * MS)
    assert not flashing_scene.is_fading
    np.testing.assert_array_equal(cell_pixels(flashing_scene, 9), cell_pixels(flashing_scene, 11))


def test_later_move_of_a_block_replaces_the_earlier_one(flashing_scene):
    flashing_scene.flash(FlashKind.EVICTED, ids_of(9), NOW)
    flashing_scene.flash(FlashKind.LOADED, ids_of(9), NOW + 10 * MS)
    loaded = cell_pixels(flashing_scene, 9).copy()
    flashing_scene.fade(NOW + 285 * MS)  # when the eviction would have faded
    np.testing.assert_array_equal(cell_pixels(flashing_scene, 9), loaded)


def test_nothing_flashes_if_flashes_are_off(flashing_scene):
    flashing_scene.is_flashing = False
    before = flashing_scene.pixels.copy()
    assert flashing_scene.flash(FlashKind.SAVED, ids_of(9), NOW) is None
    flashing_scene.change(ids_of(10), 2, NOW)
    np.testing.assert_array_equal(flashing_scene.pixels, before)
    assert not flashing_scene.is_fading


def test_unknown_block_ids_are_ignored(flashing_scene):
    assert flashing_scene.flash(FlashKind.SAVED, ids_of(200, 4_000_000_000), NOW) is None


def test_number_of_concurrent_flashes_is_bounded():
    flashes = Flashes(100_000)
    ((level, ids),) = flashes.move(FlashKind.SAVED, np.arange(50_000, dtype=np.uint32), NOW)
    assert level == top_level(FlashKind.SAVED)
    assert ids.tolist() == list(range(50_000 - MAX_MOVES_AT_ONCE, 50_000))
    pending = PendingMoves()
    for start in range(0, 100_000, 500):
        pending.add(Update(evicted=np.arange(start, start + 500, dtype=np.uint32)))
    taken = pending.pop()
    assert taken[FlashKind.EVICTED].tolist() == list(range(100_000 - MAX_MOVES_AT_ONCE, 100_000))
    assert pending.pop() == {}
    assert pending.kinds_seen == {FlashKind.EVICTED}


def test_flash_brightness_levels_fade_step_by_step_within_one_kind_of_flash():
    for kind in FlashKind:
        top = top_level(kind)
        assert LEVELS[top].kind is LEVELS[top - 1].kind is kind
        assert LEVELS[top].fade_ns < LEVELS[top - 1].fade_ns
        assert level_below(top) == top - 1
        assert level_below(top - 1) == 0
    assert len(LEVELS) == top_level(FlashKind.LOADED) + 1


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_flash_colors_can_be_distinguished(theme):
    colors = [getattr(theme, f"flash_{kind.name.lower()}") for kind in MOVES]
    assert len({pixel(color) for color in colors}) == len(MOVES)
    for color in colors:
        for state in ("free", "active", "cached", "shared", "host", "disk"):
            other = getattr(theme, f"block_{state}")
            assert sum(abs(int(color[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5)) > 60


def test_flash_symbols_differ_and_lie_inside_the_cell():
    signs = [glyph(kind, 9).tobytes() for kind in MOVES]
    assert len(set(signs)) == len(MOVES)
    for pitch in range(1, 113):
        shape = CellShape(pitch)
        for kind in MOVES:
            places = shape.glyph(top_level(kind))
            assert bool(places.size) == (pitch >= MIN_PITCH_FOR_GLYPH)
            assert not np.isin(places, shape.gap).any()
        assert not shape.glyph(top_level(FlashKind.CHANGED)).size


@pytest.fixture
def view(engine, session, qtbot, themes):
    view = PageMapView(session)
    qtbot.addWidget(view)
    view.apply_theme(THEMES["dark"])
    view.resize(720, 520)
    view.show()
    view.refresh()
    return view


def test_moves_of_a_frame_flash_and_are_in_the_legend(engine, session, poll, view):
    assert "evicted" not in view.legend.accessibleName()
    engine.write_blocks([9], evicted=ids_of(9))
    engine.write_blocks([10])
    poll(session)
    view.refresh()
    assert (cell_pixels(view.scene, 9) != cell_pixels(view.scene, 10)).any()
    view.draw_all()
    assert "flash: evicted" in view.legend.accessibleName()
    assert "copied" not in view.legend.accessibleName()
    assert "evicted from the prefix cache" in view.legend.toolTip()
    view.set_flashing(False)
    assert "evicted" not in view.legend.accessibleName()


def test_block_moves_before_an_engine_restart_do_not_flash_afterwards(engine, session, poll, view):
    engine.write_blocks([9], copied=ids_of(9))
    poll(session)
    view.refresh()
    engine.write_blocks([10], copied=ids_of(10))
    engine.restart(8)
    poll(session)
    view.refresh()
    assert not view.scene.is_fading
    engine.write_blocks([11])
    poll(session)
    view.refresh()
    np.testing.assert_array_equal(cell_pixels(view.scene, 10), cell_pixels(view.scene, 9))
    view.draw_all()
    assert "copied" not in view.legend.accessibleName()


def test_page_map_cells_do_not_flash_while_the_window_is_paused(engine, session, poll, view):
    session.timeline.pause()
    engine.write_blocks([9], saved=ids_of(9))
    poll(session)
    view.refresh()
    assert not view.scene.is_fading
