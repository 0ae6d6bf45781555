"""The palette for colour-blind eyes: what can stand side by side is told apart by eyes of all kinds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PySide6.QtGui import QColor
from tests.app.ui.color_vision import MACHADO, ciede2000, lab_seen

from kvscope_app.ui.theme import DARK, LIGHT, SAFE_DARK, SAFE_LIGHT, SAFE_THEMES, THEMES, mix
from kvscope_app.views.page_map.color_modes import lower_cached
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS, MOVES
from kvscope_app.views.page_map.drawing.ink import sign_color
from kvscope_app.views.timeline.lane_colors import PHASE_COLORS

LEAST = 10.0
THEMES_IN_TEST = pytest.mark.parametrize("theme", [SAFE_DARK, SAFE_LIGHT], ids=lambda theme: theme.name)


def states(theme):
    """Of the page map; what has no memory behind it is an outline alone."""
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


def flashes(theme):
    """Each kind at its strongest, over each state."""
    strongest = {level.kind: level for level in LEVELS if level.kind in MOVES}
    return {
        kind.name: [mix(c, getattr(theme, level.color), level.share_dark) for c in states(theme).values()]
        for kind, level in strongest.items()
    }


def least(groups):
    """The least difference between colours of two groups, over all kinds of eyes: (it, the eyes, the groups)."""
    found = []
    for kind in MACHADO:
        seen = {name: lab_seen(colors, kind) for name, colors in groups.items()}
        for first, second in combinations(seen, 2):
            apart = float(ciede2000(seen[first][:, None], seen[second][None]).min())
            found.append((apart, kind, first, second))
    return min(found)


def on_the_map(theme):
    return {name: [color] for name, color in states(theme).items()} | flashes(theme)


@THEMES_IN_TEST
def test_the_page_map_is_told_apart(theme):
    apart, *where = least(on_the_map(theme))
    assert apart >= LEAST, where


@THEMES_IN_TEST
def test_phases_of_requests_are_told_apart(theme):
    colors = {name: [getattr(theme, name)] for name in set(PHASE_COLORS.values())}
    apart, *where = least(colors)
    assert apart >= LEAST, where


@THEMES_IN_TEST
def test_curves_are_told_apart(theme):
    apart, *where = least({str(index): [color] for index, color in enumerate(theme.series)})
    assert apart >= LEAST, where


@pytest.mark.parametrize(("dark", "light"), [(SAFE_DARK, SAFE_LIGHT), (DARK, LIGHT)], ids=["safe", "usual"])
@pytest.mark.parametrize(
    "name", [f"block_{state}" for state in ("active", "cached", "shared", "host", "disk")] + ["good", "warn", "bad"]
)
def test_color_has_the_same_hue_in_dark_and_light(dark, light, name):
    hues = [QColor(getattr(theme, name)).hsvHueF() * 360 for theme in (dark, light)]
    assert abs((hues[0] - hues[1] + 180) % 360 - 180) < 30


def test_words_are_read():
    for theme in SAFE_THEMES.values():
        for name in ("good", "warn", "bad"):
            assert contrast(getattr(theme, name), theme.panel) >= 4.5, (theme.name, name)
        assert all(contrast(color, theme.base) >= 3 for color in theme.series)


def test_signs_are_seen_on_their_flashes():
    """They say without colour what the flash says."""
    for theme in (*THEMES.values(), *SAFE_THEMES.values()):
        for kind in MOVES:
            flash = getattr(theme, f"flash_{kind.name.lower()}")
            assert contrast(sign_color(kind, theme), flash) >= 3, (theme.name, kind)


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_what_stays_on_the_usual_map_is_told_apart(theme):
    """What is there for long: states, flashes beside each other, phases. Curves have names beside them."""
    groups = (
        {name: [color] for name, color in states(theme).items()},
        {kind: [getattr(theme, f"flash_{kind.name.lower()}")] for kind in MOVES},
        {name: [getattr(theme, name)] for name in set(PHASE_COLORS.values())},
    )
    for group in groups:
        apart, *where = least(group)
        assert apart >= LEAST, where
    apart, *where = least({str(index): [color] for index, color in enumerate(theme.series)})
    assert apart >= 6, where
    for name in ("good", "warn", "bad", "muted"):
        assert contrast(getattr(theme, name), theme.panel) >= 4.5, (theme.name, name)
    assert all(contrast(color, theme.base) >= 3 for color in theme.series)


def test_the_usual_palette_is_not_safe():
    """What lights up over a state can be near to another one: its sign says it as well. Or one would do."""
    """Or there would be no need for two."""
    for theme in THEMES.values():
        assert least(on_the_map(theme))[0] < 5


def test_differences_are_those_that_were_published():
    """Pairs 1, 4, 7, 17 and 25 of Sharma, Wu and Dalal."""
    pairs = (
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0000),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    )
    for first, second, published in pairs:
        assert ciede2000(np.array(first), np.array(second)) == pytest.approx(published, abs=1e-4)


def test_a_gray_is_gray_to_all_eyes():
    for kind in MACHADO:
        assert lab_seen(["#808080"], kind)[0, 1:] == pytest.approx([0, 0], abs=0.05)
    seen = lab_seen([DARK.block_disk, DARK.flash_evicted], "deuteranopia")
    assert ciede2000(seen[0], seen[1]) < 5


def contrast(first, second):
    """As WCAG 2 has it."""
    low, high = sorted(_luminance(color) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


def _luminance(color):
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
