"""Tests of the icon cache."""

from __future__ import annotations

from kvscope_app.ui.icons import pixmap
from kvscope_app.ui.theme import DARK, LIGHT


def test_same_icon_is_drawn_once(qapp):
    assert pixmap("pause", DARK.text, 18).cacheKey() == pixmap("pause", DARK.text, 18).cacheKey()


def test_icon_of_another_color_is_drawn_separately(qapp):
    assert pixmap("pause", DARK.text, 18).cacheKey() != pixmap("pause", LIGHT.text, 18).cacheKey()
