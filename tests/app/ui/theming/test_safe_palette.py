"""Tests of the colour-blind safe palette: adjacent colours can be distinguished with every kind of vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PySide6.QtGui import QColor
from tests.app.ui.color_vision import MACHADO, ciede2000, lab_seen

from kvscope_app.ui.theme import DARK, LIGHT, SAFE_DARK, SAFE_LIGHT, SAFE_THEMES, THEMES, mix
from kvscope_app.views.page_map.color_modes import lower_cached
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES
from kvscope_app.views.page_map.drawing.pixel_tables import glyph_color
from kvscope_app.views.timeline.lane_colors import PHASE_COLORS

MIN_DIFFERENCE = 10.0
THEMES_IN_TEST = pytest.mark.parametrize("theme", [SAFE_DARK, SAFE_LIGHT], ids=lambda theme: theme.name)


def state_colors(theme):
    """Return the colours of page map states; blocks without memory have only an outline."""
    return {
        "free": theme.block_free,
        "active": theme.block_active,
        "cached": theme.block_cached,
        "shared": theme.block_shared,
        "host": theme.block_host,
        "disk": theme.block_disk,
        "host, cached": lower_cached(theme.block_host, theme),
        "disk, cached": lower_cached(theme.block_disk, theme),
        "unknown": theme.muted,
    }


def flash_colors(theme):
    """Return the colours of each kind of flash at its strongest, over each state."""
    strongest = {level.kind: level for level in LEVELS if level.kind in MOVES}
    return {
        kind.name: [mix(c, getattr(theme, level.color), level.share_dark) for c in state_colors(theme).values()]
        for kind, level in strongest.items()
    }


def smallest_difference(groups):
    """Return (smallest difference between colours of two groups, kind of vision, first group, second group)."""
    found = []
    for kind in MACHADO:
        seen = {name: lab_seen(colors, kind) for name, colors in groups.items()}
        for first, second in combinations(seen, 2):
            apart = float(ciede2000(seen[first][:, None], seen[second][None]).min())
            found.append((apart, kind, first, second))
    return min(found)


def page_map_colors(theme):
    return {name: [color] for name, color in state_colors(theme).items()} | flash_colors(theme)


@THEMES_IN_TEST
def test_page_map_colors_can_be_distinguished(theme):
    apart, *where = smallest_difference(page_map_colors(theme))
    assert apart >= MIN_DIFFERENCE, where


@THEMES_IN_TEST
def test_request_phase_colors_can_be_distinguished(theme):
    colors = {name: [getattr(theme, name)] for name in set(PHASE_COLORS.values())}
    apart, *where = smallest_difference(colors)
    assert apart >= MIN_DIFFERENCE, where


@THEMES_IN_TEST
def test_curve_colors_can_be_distinguished(theme):
    apart, *where = smallest_difference({str(index): [color] for index, color in enumerate(theme.series)})
    assert apart >= MIN_DIFFERENCE, where


@pytest.mark.parametrize(("dark", "light"), [(SAFE_DARK, SAFE_LIGHT), (DARK, LIGHT)], ids=["safe", "usual"])
@pytest.mark.parametrize(
    "name", [f"block_{state}" for state in ("active", "cached", "shared", "host", "disk")] + ["good", "warn", "bad"]
)
def test_color_has_the_same_hue_in_dark_and_light(dark, light, name):
    hues = [QColor(getattr(theme, name)).hsvHueF() * 360 for theme in (dark, light)]
    assert abs((hues[0] - hues[1] + 180) % 360 - 180) < 30


def test_text_and_curve_colors_have_enough_contrast():
    for theme in SAFE_THEMES.values():
        for name in ("good", "warn", "bad"):
            assert contrast(getattr(theme, name), theme.panel) >= 4.5, (theme.name, name)
        assert all(contrast(color, theme.base) >= 3 for color in theme.series)


def test_flash_symbols_have_enough_contrast():
    for theme in (*THEMES.values(), *SAFE_THEMES.values()):
        for kind in MOVES:
            flash = getattr(theme, f"flash_{kind.name.lower()}")
            assert contrast(glyph_color(kind, theme), flash) >= 3, (theme.name, kind)


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_state_flash_and_phase_colors_of_the_default_palette_can_be_distinguished(theme):
    """Checks states, flashes and phases. Curves may be closer, because they are labelled."""
    groups = (
        {name: [color] for name, color in state_colors(theme).items()},
        {kind: [getattr(theme, f"flash_{kind.name.lower()}")] for kind in MOVES},
        {name: [getattr(theme, name)] for name in set(PHASE_COLORS.values())},
    )
    for group in groups:
        apart, *where = smallest_difference(group)
        assert apart >= MIN_DIFFERENCE, where
    apart, *where = smallest_difference({str(index): [color] for index, color in enumerate(theme.series)})
    assert apart >= 6, where
    for name in ("good", "warn", "bad", "muted"):
        assert contrast(getattr(theme, name), theme.panel) >= 4.5, (theme.name, name)
    assert all(contrast(color, theme.base) >= 3 for color in theme.series)


def test_default_palette_is_not_colour_blind_safe():
    """Otherwise a second palette would not be needed."""
    for theme in THEMES.values():
        assert smallest_difference(page_map_colors(theme))[0] < 5


def test_ciede2000_equals_published_values():
    """Uses pairs 1, 4, 7, 17 and 25 of Sharma, Wu and Dalal."""
    pairs = (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0000),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    )
    for first, second, published in pairs:
        assert ciede2000(np.array(first), np.array(second)) == pytest.approx(published, abs=1e-4)


def test_gray_stays_gray_for_every_kind_of_vision():
    for kind in MACHADO:
        assert lab_seen(["#808080"], kind)[0, 1:] == pytest.approx([0, 0], abs=0.05)
    seen = lab_seen([DARK.block_disk, DARK.flash_evicted], "deuteranopia")
    assert ciede2000(seen[0], seen[1]) < 5


def contrast(first, second):
    """Return the WCAG 2 contrast ratio."""
    low, high = sorted(_luminance(color) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(color):
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
