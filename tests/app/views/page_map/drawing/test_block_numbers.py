"""Test that block numbers of two tiers do not overlap."""

from __future__ import annotations

import pytest

from kvscope_app.views.page_map.drawing.block_numbers import labels_overlap
from kvscope_app.views.page_map.drawing.grid import Section


@pytest.mark.parametrize(("pitch", "is_crowded"), [(6.0, True), (16.0, False)])
def test_first_block_number_of_a_tier_overlaps_the_one_above_only_if_cells_are_small(themes, pitch, is_crowded):
    memory, host = Section(0, 96, 0, 0), Section(96, 182, 3, 192)  # two rows of 64, a heading, three rows
    assert labels_overlap(memory, host, 64, pitch, 30.0) is is_crowded
