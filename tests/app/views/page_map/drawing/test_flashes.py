"""Flashes: what moves lights up in its own colour with its own sign, fades, and costs a bounded amount."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.ui.theme import DARK, LIGHT, THEMES
from kvscope_app.views.page_map.drawing.cells import CellShape
from kvscope_app.views.page_map.drawing.flash_glyphs import GLYPHS_FROM, glyph
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES, FlashKind, level_below, top_level
from kvscope_app.views.page_map.drawing.flashes import MAX_MOVES_AT_ONCE, Flashes
from kvscope_app.views.page_map.drawing.ink import Ink, pixel
from kvscope_app.views.page_map.drawing.scene import Scene
from kvscope_app.views.page_map.page_map_view import PageMapView, PendingMoves
from kvscope_telemetry.ledger import BlockState, Ledger
from kvscope_telemetry.source import Update

MS = 1_000_000
NOW = 10_000 * MS


def ids_of(*blocks):
    return np.array(blocks, np.uint32)


@pytest.fixture
def lit():
    """A scene of 200 active blocks that flashes."""
    scene = Scene()
    scene.resize(640, 400)
    ledger = Ledger(200)
    ledger.state[:], ledger.filled[:] = BlockState.ACTIVE, 16
    scene.set_ledger(ledger, 16, 1)
    return scene


def cell(scene, block):
    x, y = (int(v) for v in scene.camera.corner_of(*scene.grid.place_of(block)))
    pitch = int(scene.camera.pitch)
    return scene.pixels[y : y + pitch, x : x + pitch]


@pytest.mark.parametrize("kind", MOVES)
def test_a_move_flashes_in_its_colour_with_its_sign_and_fades(lit, kind):
    before = lit.pixels.copy()
    lit.flash(kind, ids_of(9), NOW)
    ink = Ink(lit.mode, DARK)
    tinted = ink.solid[0, top_level(kind), lit.cells.ranks_of(ids_of(9))[0]]
    shown = cell(lit, 9)
    assert (shown == tinted).sum() > 20
    assert (shown[5:-5, 5:-5] == ink.glyphs[kind]).sum() > 4
    assert (cell(lit, 10) == cell(lit, 8)).all()
    lit.fade(NOW + 300 * MS)
    assert lit.is_fading
    assert not (cell(lit, 9) == tinted).any()
    lit.fade(NOW + 600 * MS)
    assert not lit.is_fading
    np.testing.assert_array_equal(lit.pixels, before)


def test_a_change_does_not_put_out_what_says_more(lit):
    lit.flash(FlashKind.EVICTED, ids_of(9), NOW)
    evicted = cell(lit, 9).copy()
    lit.change(ids_of(9, 10), 2, NOW + 16 * MS)
    np.testing.assert_array_equal(cell(lit, 9), evicted)
    assert (cell(lit, 10) != evicted).any()
    lit.fade(NOW + 300 * MS)
    lit.fade(NOW + 600 * MS)
    assert not lit.is_fading
    np.testing.assert_array_equal(cell(lit, 9), cell(lit, 11))


def test_the_later_move_of_a_block_wins(lit):
    lit.flash(FlashKind.EVICTED, ids_of(9), NOW)
    lit.flash(FlashKind.LOADED, ids_of(9), NOW + 10 * MS)
    loaded = cell(lit, 9).copy()
    lit.fade(NOW + 285 * MS)  # the eviction's time is over, it says nothing any more
    np.testing.assert_array_equal(cell(lit, 9), loaded)


def test_nothing_flashes_when_a_person_does_not_want_it(lit):
    lit.flashing = False
    before = lit.pixels.copy()
    assert lit.flash(FlashKind.SAVED, ids_of(9), NOW) is None
    lit.change(ids_of(10), 2, NOW)
    np.testing.assert_array_equal(lit.pixels, before)
    assert not lit.is_fading


def test_ids_the_ledger_does_not_have_are_left_out(lit):
    assert lit.flash(FlashKind.SAVED, ids_of(200, 4_000_000_000), NOW) is None


def test_what_is_lit_at_once_is_bounded():
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


def test_levels_go_down_one_by_one_within_their_kind():
    for kind in FlashKind:
        top = top_level(kind)
        assert LEVELS[top].kind is LEVELS[top - 1].kind is kind
        assert LEVELS[top].fade_ns < LEVELS[top - 1].fade_ns
        assert level_below(top) == top - 1
        assert level_below(top - 1) == 0
    assert len(LEVELS) == top_level(FlashKind.LOADED) + 1


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_colours_of_flashes_are_told_apart(theme):
    colors = [getattr(theme, f"flash_{kind.name.lower()}") for kind in MOVES]
    assert len({pixel(color) for color in colors}) == len(MOVES)
    for color in colors:
        for state in ("free", "active", "cached", "shared", "host", "disk"):
            other = getattr(theme, f"block_{state}")
            assert sum(abs(int(color[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5)) > 60


def test_signs_differ_in_form_and_lie_inside_the_cell():
    signs = [glyph(kind, 9).tobytes() for kind in MOVES]
    assert len(set(signs)) == len(MOVES)
    for pitch in range(1, 113):
        shape = CellShape(pitch)
        for kind in MOVES:
            places = shape.glyph(top_level(kind))
            assert bool(places.size) == (pitch >= GLYPHS_FROM)
            assert not np.isin(places, shape.gap).any()
        assert not shape.glyph(top_level(FlashKind.CHANGED)).size


@pytest.fixture
def view(engine, session, qtbot, themes):
    made = PageMapView(session)
    qtbot.addWidget(made)
    made.apply_theme(THEMES["dark"])
    made.resize(720, 520)
    made.show()
    made.refresh()
    return made


def test_moves_of_a_frame_light_up_and_the_legend_explains_them(engine, session, poll, view):
    assert "evicted" not in view.legend.accessibleName()
    engine.hold([9], evicted=ids_of(9))
    engine.hold([10])
    poll(session)
    view.refresh()
    assert (cell(view.scene, 9) != cell(view.scene, 10)).any()
    view.draw_all()
    assert "flash: evicted" in view.legend.accessibleName()
    assert "copied" not in view.legend.accessibleName()
    assert "evicted from the prefix cache" in view.legend.toolTip()
    view.set_flashing(False)
    assert "evicted" not in view.legend.accessibleName()


def test_moves_of_an_engine_before_are_forgotten(engine, session, poll, view):
    engine.hold([9], copied=ids_of(9))
    poll(session)
    view.refresh()
    engine.hold([10], copied=ids_of(10))
    engine.begin(8)
    poll(session)
    view.refresh()
    assert not view.scene.is_fading
    engine.hold([11])
    poll(session)
    view.refresh()
    np.testing.assert_array_equal(cell(view.scene, 10), cell(view.scene, 9))
    view.draw_all()
    assert "copied" not in view.legend.accessibleName()


def test_paused_nothing_flashes(engine, session, poll, view):
    session.timeline.pause()
    engine.hold([9], saved=ids_of(9))
    poll(session)
    view.refresh()
    assert not view.scene.is_fading
