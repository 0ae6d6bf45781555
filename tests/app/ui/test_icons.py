"""Icons are drawn once, for all windows."""

from __future__ import annotations

from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.theme import DARK, LIGHT


def test_windows_share_their_icons(qapp):
    assert pixmap("pause", DARK.text, 18).cacheKey() == pixmap("pause", DARK.text, 18).cacheKey()


def test_a_color_has_a_drawing_of_its_own(qapp):
    assert pixmap("pause", DARK.text, 18).cacheKey() != pixmap("pause", LIGHT.text, 18).cacheKey()
