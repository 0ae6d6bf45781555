"""Tests of the strip of a request's blocks."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QColor

from kvscope_app.ui.theme import DARK
from kvscope_app.views.requests.block_strip import MAX_NAMED, BlockStrip, small_cells
from kvscope_telemetry.messages.telemetry import CacheInfo

NUM_BLOCKS = 300


@pytest.fixture
def strip(qtbot):
    strip = BlockStrip()
    qtbot.addWidget(strip)
    strip.apply_theme(DARK)
    return strip


def show_blocks(strip, ids, seed=5, cache=None):
    random = np.random.default_rng(seed)
    filled, refs = random.integers(0, 17, ids.size), random.integers(1, 3, ids.size)
    strip.show_blocks(ids, filled, refs, 16, cache)
    strip.resize(400, strip.heightForWidth(400))
    return filled, refs


def test_each_cell_of_a_request_block_strip_has_the_color_and_fill_height_of_its_block(strip):
    cache = CacheInfo(num_blocks=200, block_size=16, num_host_blocks=60, num_disk_blocks=40)
    ids = np.random.default_rng(1).permutation(NUM_BLOCKS)
    filled, refs = show_blocks(strip, ids, cache=cache)
    image = strip.grab().toImage()
    for index in range(NUM_BLOCKS):
        box = strip.cell_rect(index)
        below = [DARK.block_host, DARK.block_disk][int(ids[index] >= 260)]
        pool = DARK.block_shared if refs[index] > 1 else DARK.block_active
        ink = below if ids[index] >= 200 else pool
        height = round(box.height() * filled[index] / 16)
        for y in range(box.height()):
            wanted = QColor(ink if y >= box.height() - height else DARK.block_free)
            found = image.pixelColor(box.center().x(), box.top() + y)
            assert found == wanted, f"block {index}, line {y} of its cell"


def test_partial_repaint_equals_the_full_painting(strip, qtbot):
    show_blocks(strip, np.arange(5_000))
    whole = strip.grab().toImage()
    part = strip.rect().adjusted(0, 377, 0, -211)
    assert strip.grab(part).toImage() == whole.copy(part)


def test_few_blocks_are_painted_with_their_ids(strip):
    filled, refs = show_blocks(strip, np.arange(MAX_NAMED))
    named = strip.grab().toImage()
    strip.show_blocks(np.arange(MAX_NAMED) + 100, filled, refs, 16)
    assert strip.grab().toImage() != named


def test_block_that_becomes_shared_is_repainted(strip):
    ids = np.arange(NUM_BLOCKS)
    filled, _ = show_blocks(strip, ids)
    strip.show_blocks(ids, filled, np.ones(NUM_BLOCKS, np.int64), 16)
    before = strip.grab().toImage()
    strip.show_blocks(ids, filled, np.full(NUM_BLOCKS, 2), 16)
    assert strip.grab().toImage() != before


def test_tiny_block_cells_are_painted_with_a_line_between_rows_and_none_after_the_last():
    image = small_cells(np.array([7, 8, 9], np.uint32), np.array([13, 0, 1]), per_row=2, empty=3)
    assert image.shape == (32, 32)
    assert image[0, 0] == image[12, 12] == 7
    assert image[12, 16] == 3
    assert (image[16 + 12, 0], image[16 + 11, 0]) == (9, 3)
    assert not image[16:, 16:].any()
    assert not image[13:16].any()


def test_painting_cost_depends_on_visible_rows_only(strip):
    """The number of calls must not grow with the table, which is painted several times a second."""

    def num_calls(num_blocks):
        show_blocks(strip, np.arange(num_blocks))
        seen = QRect(0, 0, strip.width(), 240)
        strip.grab(seen)
        calls = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            strip.grab(seen)
        finally:
            sys.setprofile(None)
        return len(calls)

    few = num_calls(4_000)
    assert num_calls(40_000) < 2 * few < 4_000  # leaves room for calls of the garbage collector


def test_block_table_entry_freed_by_a_sliding_window_is_described_as_released(strip):
    show_blocks(strip, np.array([0, 0, 7]), cache=CacheInfo(num_blocks=200, block_size=16, num_reserved_blocks=1))
    assert strip.tip(1) == "Released: no block\nindex 1 of the table, positions 16 to 31"
    assert strip.tip(2).startswith("Block 7\n")
