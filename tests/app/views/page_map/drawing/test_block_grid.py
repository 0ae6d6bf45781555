"""Tests of the grid of blocks and of the camera."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvscope_app.views.page_map.drawing.grid import MAX_PITCH, MIN_CELL_PITCH, Camera, Grid
from kvscope_app.views.page_map.drawing.scene import fit


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64, 500, 1456, 44_444, 300_000, 1_000_000])
@pytest.mark.parametrize("window", [(1000, 700), (320, 240), (180, 900), (2600, 40)])
def test_fit_shows_every_block_inside_the_window(num_blocks, window):
    width, height = window
    grid, camera = fit(num_blocks, width, height)
    assert grid.rows * grid.columns >= num_blocks > (grid.rows - 1) * grid.columns
    right, bottom = camera.corner_of(grid.rows, grid.columns)
    assert camera.x >= -1
    assert camera.y >= -1
    assert right <= width + 1
    assert bottom <= height + 1


@pytest.mark.parametrize("num_blocks", [500, 1456, 5_000, 30_000])
def test_fit_uses_whole_pixels_and_most_of_the_window(num_blocks):
    grid, camera = fit(num_blocks, 1000, 700)
    assert camera.pitch == int(camera.pitch) >= MIN_CELL_PITCH
    assert grid.rows * grid.columns * camera.pitch**2 > 0.55 * 1000 * 700


def test_million_blocks_fill_the_window():
    grid, camera = fit(1_000_000, 1000, 700)
    assert camera.pitch < 1
    assert grid.columns * camera.pitch > 990
    assert grid.rows * camera.pitch > 690


def test_page_map_rows_begin_at_block_numbers_that_are_multiples_of_8():
    grid, _ = fit(1024, 1000, 700)
    assert grid.columns % 8 == 0


def test_zoom_keeps_the_block_under_the_pointer():
    grid, camera = fit(1_000_000, 1000, 700)
    before = camera.cell_at(400, 300)
    for _ in range(8):
        camera = camera.zoomed(1.4, 400, 300, 0.1).clamped(grid, 1000, 700)
    row, column = camera.cell_at(400, 300)
    assert abs(row - before[0]) <= 2
    assert abs(column - before[1]) <= 2


def test_zoom_increases_until_the_maximum_pitch():
    camera = Camera(4.0, 0.0, 0.0)
    pitches = []
    for _ in range(60):
        camera = camera.zoomed(1.05, 0, 0, 1.0)
        pitches.append(camera.pitch)
    assert pitches[-1] == MAX_PITCH
    assert all(b > a or b == MAX_PITCH for a, b in pairwise(pitches))


def test_panning_stops_at_the_edge():
    grid = Grid(10_000, 100)
    camera = Camera(20.0, 500.0, 900.0).clamped(grid, 1000, 700)
    assert (camera.x, camera.y) == (0.0, 0.0)
    camera = Camera(20.0, -1e6, -1e6).clamped(grid, 1000, 700)
    assert (camera.x, camera.y) == (-1000.0, -1300.0)


def test_block_lookup_outside_the_page_map_grid_returns_none():
    grid = Grid(10, 4)
    assert grid.block_at(0, 0) == 0
    assert grid.block_at(2, 1) == 9
    assert grid.block_at(2, 2) is None
    assert grid.block_at(0, 4) is None
    assert grid.block_at(-1, 0) is None
    assert grid.block_at(0, -1) is None
