"""Tests of the usage bar of the page map."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import DARK
from kvscope_app.views.page_map.usage_bar import UsageBar


@pytest.mark.parametrize("used_share", [None, 0.5])
def test_enlarged_bar_is_filled_over_its_whole_height(qtbot, themes, used_share):
    bar = UsageBar()
    qtbot.addWidget(bar)
    bar.apply_theme(DARK)
    bar.resize(200, 14)
    bar.setFixedHeight(14)  # as at a zoom of 200 %
    if used_share is None:
        bar.show_counts(5, 0, 5)
    else:
        bar.show_share(used_share)
    image = bar.grab().toImage()
    assert {image.pixelColor(20, y).name() for y in (2, 11)} == {DARK.block_active}
