"""Icons are drawn once: Qt keeps a drawing of each pixmap it was ever shown."""

from __future__ import annotations

from kvscope_app.look.icons import icon
from kvscope_app.look.theme import DARK, LIGHT


def test_windows_share_their_icons(qapp):
    assert icon("pause", DARK.text, DARK.border).cacheKey() == icon("pause", DARK.text, DARK.border).cacheKey()


def test_a_color_has_an_icon_of_its_own(qapp):
    assert icon("pause", DARK.text).cacheKey() != icon("pause", LIGHT.text).cacheKey()
