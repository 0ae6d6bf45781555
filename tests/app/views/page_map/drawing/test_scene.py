"""Tests of page map pixels: every block is visible, and incremental drawing equals a full redraw."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.page_map import color_modes as modes
from kvscope_app.views.page_map.color_modes import AGE, OWNER, STATE
from kvscope_app.views.page_map.drawing.pixel_tables import Emphasis, PixelTables, pixel
from kvscope_app.views.page_map.drawing.scene import Scene, union
from kvscope_telemetry.ledger import BlockState, Ledger

S = 1_000_000_000


def make_scene(num_blocks, size=(640, 400), mode=STATE):
    scene = Scene()
    scene.is_flashing = False
    scene.set_mode(mode)
    scene.resize(*size)
    ledger = Ledger(num_blocks)
    scene.set_ledger(ledger, 16, 1)
    return scene, ledger


def set_blocks(ledger, ids, filled=16, refs=1, owner=1, state=BlockState.ACTIVE):
    ids = np.asarray(ids, np.uint32)
    ledger.state[ids], ledger.filled[ids], ledger.ref_count[ids], ledger.owner[ids] = state, filled, refs, owner
    return ids


def center_pixel(scene, block):
    x, y = scene.camera.corner_of(*divmod(block, scene.grid.columns))
    middle = scene.camera.pitch / 2
    return scene.pixels[min(int(y + middle), scene.height - 1), min(int(x + middle), scene.width - 1)]


def test_block_centres_have_the_color_of_their_state():
    scene, ledger = make_scene(500)
    set_blocks(ledger, [0, 17])
    set_blocks(ledger, [250], state=BlockState.CACHED, refs=0)
    set_blocks(ledger, [499], refs=2)
    scene.change(np.array([0, 17, 250, 499], np.uint32), 2, S)
    assert center_pixel(scene, 0) == center_pixel(scene, 17) == pixel(DARK.block_active)
    assert center_pixel(scene, 250) == pixel(DARK.block_cached)
    assert center_pixel(scene, 499) == pixel(DARK.block_shared)
    assert center_pixel(scene, 1) == pixel(DARK.block_free)


def test_half_filled_block_is_solid_on_the_left_and_hollow_on_the_right():
    scene, ledger = make_scene(60)
    set_blocks(ledger, [7], filled=8)
    scene.change(np.array([7], np.uint32), 2, S)
    x, y = (int(v) for v in scene.camera.corner_of(*divmod(7, scene.grid.columns)))
    pitch = int(scene.camera.pitch)
    row = scene.pixels[y + pitch // 2, x : x + pitch]
    assert row[pitch // 4] == pixel(DARK.block_active)
    assert row[pitch * 3 // 4] == PixelTables(STATE, DARK).hollow[0, 0, Emphasis.NORMAL << 8 | modes.ACTIVE]


@pytest.mark.parametrize("num_blocks", [40_000, 300_000, 1_000_000])
def test_single_active_block_is_always_visible(num_blocks):
    rng = np.random.default_rng(num_blocks)
    for block in rng.integers(0, num_blocks, 12).tolist():
        scene, ledger = make_scene(num_blocks, size=(500, 350))
        scene.change(set_blocks(ledger, [block]), 2, S)
        assert (scene.pixels == pixel(DARK.block_active)).any(), block
        after_change = scene.pixels.copy()
        scene.fit_all()
        np.testing.assert_array_equal(scene.pixels, after_change)


@pytest.mark.parametrize("num_blocks", [37, 500, 1456, 9_001, 44_000, 300_000])
@pytest.mark.parametrize("zoom", [1.0, 1.7, 6.0])
@pytest.mark.parametrize("mode", [STATE, OWNER])
def test_incremental_drawing_equals_a_full_redraw(num_blocks, zoom, mode):
    rng = np.random.default_rng(num_blocks)
    scene, ledger = make_scene(num_blocks, size=(331, 257), mode=mode)
    if zoom != 1.0:
        scene.zoom(zoom, 100, 90)
    for step in range(4):
        ids = np.unique(rng.integers(0, num_blocks, max(1, num_blocks // 40))).astype(np.uint32)
        set_blocks(
            ledger, ids, owner=int(rng.integers(1, 200)), filled=int(rng.integers(0, 17)), refs=int(rng.integers(1, 4))
        )
        set_blocks(ledger, ids[::3], state=BlockState.FREE, filled=0, refs=0, owner=-1)
        scene.change(ids, step + 2, S)
    incremental = scene.pixels.copy()
    scene.pan(0, 0)
    np.testing.assert_array_equal(incremental, scene.pixels)


def test_page_map_redraw_reports_pixel_rows_that_cover_every_changed_pixel():
    scene, ledger = make_scene(1456)
    before = scene.pixels.copy()
    span = scene.change(set_blocks(ledger, [300, 305]), 2, S)
    rows = np.flatnonzero((scene.pixels != before).any(axis=1))
    assert span is not None
    assert span[0] <= rows.min()
    assert rows.max() < span[1]
    assert span[1] - span[0] < scene.height // 4


def test_selection_is_outlined_and_dims_other_blocks():
    scene, ledger = make_scene(500)
    scene.change(set_blocks(ledger, range(20)), 2, S)
    scene.select(np.array([3, 4], np.uint32))
    tables = PixelTables(STATE, DARK)
    assert center_pixel(scene, 3) == pixel(DARK.block_active)
    assert center_pixel(scene, 5) == tables.solid[0, 0, Emphasis.DIMMED << 8 | modes.ACTIVE]
    x, y = (int(v) for v in scene.camera.corner_of(*divmod(3, scene.grid.columns)))
    pitch = int(scene.camera.pitch)
    assert (scene.pixels[y : y + pitch, x : x + pitch] == pixel(DARK.selection)).sum() > pitch
    scene.select(None)
    assert center_pixel(scene, 5) == pixel(DARK.block_active)


def test_growing_selection_redraws_only_its_new_blocks():
    scene, _ = make_scene(2000)
    scene.select(np.array([3], np.uint32))
    assert scene.cells is not None
    assert scene.cells.select(np.array([3, 9], np.uint32)).tolist() == [9]


def test_selected_block_is_visible_among_many_in_one_pixel():
    scene, ledger = make_scene(1_000_000, size=(200, 150))
    scene.change(set_blocks(ledger, np.arange(0, 1_000_000, 2), refs=2), 2, S)
    scene.change(set_blocks(ledger, [500_001]), 3, S)
    scene.select(np.array([500_001], np.uint32))
    assert (scene.pixels == pixel(DARK.block_active)).any()


def test_changed_cells_flash_and_fade():
    scene, ledger = make_scene(500)
    scene.is_flashing = True
    scene.change(set_blocks(ledger, [9]), 2, 10 * S)
    lit = center_pixel(scene, 9)
    assert lit != pixel(DARK.block_active)
    assert scene.is_fading
    scene.fade(10 * S + 200_000_000)
    fading = center_pixel(scene, 9)
    assert fading not in (lit, pixel(DARK.block_active))
    scene.fade(10 * S + 400_000_000)
    assert center_pixel(scene, 9) == pixel(DARK.block_active)
    assert not scene.is_fading


def test_block_that_changes_again_while_flashing_keeps_full_flash_brightness():
    scene, ledger = make_scene(500)
    scene.is_flashing = True
    ids = set_blocks(ledger, [9])
    scene.change(ids, 2, 10 * S)
    lit = center_pixel(scene, 9)
    scene.change(ids, 3, 10 * S + 130_000_000)
    scene.fade(10 * S + 200_000_000)
    assert center_pixel(scene, 9) == lit


def test_nothing_flashes_if_all_blocks_change():
    scene, ledger = make_scene(20_000)
    scene.is_flashing = True
    scene.change(set_blocks(ledger, range(20_000)), 2, 10 * S)
    assert not scene.is_fading


def test_theme_change_repaints_everything():
    scene, ledger = make_scene(500)
    scene.change(set_blocks(ledger, [0]), 2, S)
    scene.set_theme(LIGHT)
    assert center_pixel(scene, 0) == pixel(LIGHT.block_active)
    assert scene.pixels[0, 0] == pixel(LIGHT.base)


def test_page_map_age_colors_are_redrawn_when_the_engine_step_advances():
    scene, ledger = make_scene(500, mode=AGE)
    ledger.last_used_step[0] = 5
    scene.change(set_blocks(ledger, [0]), 5, S)
    fresh = center_pixel(scene, 0)
    assert scene.redraw_ages(5) is not None, "other blocks are older"
    assert scene.redraw_ages(5) is None
    assert scene.redraw_ages(4000) is not None
    assert center_pixel(scene, 0) != fresh


def test_resizing_fits_the_map_unless_it_is_zoomed():
    scene, _ = make_scene(1456)
    scene.resize(1000, 700)
    assert scene.is_fitted
    scene.zoom(2.0, 10, 10)
    pitch = scene.camera.pitch
    scene.resize(900, 600)
    assert scene.camera.pitch == pitch
    scene.fit_all()
    assert scene.camera.pitch < pitch


def test_zooming_out_ends_at_the_fitted_map():
    scene, _ = make_scene(1456)
    whole = scene.camera
    scene.zoom(4.0, 50, 50)
    for _ in range(20):
        scene.zoom(0.7, 50, 50)
    assert scene.is_fitted
    assert scene.camera == whole


def test_page_map_pans_to_reveal_a_block_outside_the_window():
    scene, _ = make_scene(10_000)
    scene.zoom(6.0, 0, 0)
    scene.reveal(9_999)
    x, y = scene.camera.corner_of(*divmod(9_999, scene.grid.columns))
    assert 0 <= x <= scene.width - scene.camera.pitch
    assert 0 <= y <= scene.height - scene.camera.pitch


def test_block_at_returns_the_block_under_a_pixel():
    scene, _ = make_scene(500)
    for block in (0, 123, 499):
        x, y = scene.camera.corner_of(*divmod(block, scene.grid.columns))
        assert scene.block_at(x + 1, y + 1) == block
    assert scene.block_at(-5, 10) is None


def test_tiny_windows_and_pools_are_drawn():
    for num_blocks in (1, 3, 100_000):
        for size in ((1, 1), (7, 300), (300, 2)):
            scene, ledger = make_scene(num_blocks, size=size)
            scene.change(set_blocks(ledger, [0]), 2, S)
            scene.zoom(3.0, 0, 0)
            scene.fit_all()
            assert scene.pixels.shape == size[::-1]
            assert scene.pixels.any(), (num_blocks, size)


def test_union_of_two_pixel_row_spans_covers_both():
    assert union(None, None) is None
    assert union((3, 5), None) == (3, 5)
    assert union((3, 5), (1, 4)) == (1, 5)
