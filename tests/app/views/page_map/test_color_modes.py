"""Tests of the keys and colours of each colour mode."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.page_map import color_modes as modes
from kvscope_app.views.page_map.color_modes import AGE, ATTENTION, COLOR_MODES, EVICTION, FILL, OWNER, SHARING, STATE
from kvscope_app.views.page_map.drawing.flash_kinds import LEVELS
from kvscope_app.views.page_map.drawing.pixel_tables import PixelTables
from kvscope_telemetry.ledger import BlockState, Ledger, Tier, attention_units
from kvscope_telemetry.messages.capabilities import OWN_ENGINE

ALL = slice(None)


@pytest.fixture
def ledger():
    """Ledger of 6 blocks: free, active, shared, cached, active in host memory, cached on disk."""
    ledger = Ledger(6)
    ledger.state[:] = [BlockState.FREE, 1, 1, BlockState.CACHED, 1, 2]
    ledger.ref_count[:] = [0, 1, 3, 0, 1, 0]
    ledger.owner[:] = [-1, 5, 6, 7, 5 + modes.NUM_OWNER_KEYS, 8]
    ledger.filled[:] = [0, 16, 4, 16, 0, 16]
    ledger.tier[:] = [0, 0, 0, 0, Tier.HOST, Tier.DISK]
    ledger.last_used_step[:] = [0, 100, 99, 90, 50, 0]
    return ledger


def test_state_color_mode_depends_on_block_state_sharing_and_tier(ledger):
    expected = [modes.FREE, modes.ACTIVE, modes.SHARED, modes.CACHED, modes.HOST, modes.DISK_CACHED]
    assert STATE.keys(ledger, ALL, 16, 100).tolist() == expected


def test_owner_colors_repeat_and_differ_for_cached_blocks(ledger):
    result = OWNER.keys(ledger, ALL, 16, 100)
    assert result[0] == modes.FREE
    assert result[1] == result[4] == modes.OWNER_ACTIVE + 5
    assert result[3] == modes.OWNER_CACHED + 7


def test_fill_color_mode_ranks_blocks_with_most_empty_slots_highest(ledger):
    result = FILL.keys(ledger, ALL, 16, 100)
    assert result[0] == modes.FREE
    assert result[1] == modes.FILL_FULL
    assert result[4] == modes.FILL_FULL + modes.FILL_STEPS
    assert result[1] < result[2] < result[4]


def test_sharing_color_mode_ranks_blocks_by_number_of_holders(ledger):
    ledger.ref_count[4] = 1000
    result = SHARING.keys(ledger, ALL, 16, 100)
    assert result.tolist()[:4] == [modes.FREE, modes.ONE_HOLDER, modes.ONE_HOLDER + 2, modes.UNHELD]
    assert result[4] == modes.UNHELD + modes.MAX_HOLDERS


def test_eviction_keys_rank_the_next_block_highest(ledger):
    ledger.state[4:] = BlockState.CACHED
    ledger.eviction_order[3:] = [70, 50, 90]
    ledger.tier[:] = Tier.HBM
    result = EVICTION.keys(ledger, ALL, 16, 100)
    half = modes.EVICTED_LAST + modes.EVICTION_STEPS // 2
    last, soonest = modes.EVICTED_LAST, modes.EVICTED_LAST + modes.EVICTION_STEPS
    assert result.tolist() == [modes.FREE, modes.IN_USE, modes.IN_USE, half, soonest, last]
    assert EVICTION.keys(ledger, np.array([5, 3], np.uint32), 16, 100).tolist() == [last, half]


def test_eviction_keys_are_ranked_per_tier(ledger):
    ledger.state[1:] = BlockState.CACHED
    ledger.tier[4:] = Tier.HOST
    ledger.eviction_order[1:] = [1001, 1003, 1002, 6, 5]
    result = EVICTION.keys(ledger, ALL, 16, 100)
    half = modes.EVICTED_LAST + modes.EVICTION_STEPS // 2
    last, soonest = modes.EVICTED_LAST, modes.EVICTED_LAST + modes.EVICTION_STEPS
    assert result.tolist() == [modes.FREE, soonest, last, half, last, soonest]


def test_cached_block_without_eviction_order_is_not_shown_as_in_use(ledger):
    ledger.state[3:] = BlockState.CACHED
    ledger.eviction_order[3:] = [7, 0, 0]
    ledger.tier[5] = Tier.STATES
    result = EVICTION.keys(ledger, ALL, 16, 100)
    assert result.tolist()[1:3] == [modes.IN_USE] * 2
    assert result.tolist()[4:] == [modes.NO_ORDER] * 2


def test_eviction_mode_is_disabled_if_the_order_is_not_reported():
    assert EVICTION.why_not(OWN_ENGINE) == "This engine does not report the order of eviction"
    assert not EVICTION.why_not(replace(OWN_ENGINE, eviction_order=True))


def test_age_keys_rank_the_newest_highest_even_for_future_steps(ledger):
    result = AGE.keys(ledger, ALL, 16, 100).astype(int)
    assert result[1] == modes.OLDEST + modes.AGE_STEPS
    assert result[1] > result[2] > result[3] > result[4] > result[0]
    assert AGE.keys(ledger, ALL, 16, 10)[1] == modes.OLDEST + modes.AGE_STEPS


@pytest.mark.parametrize("mode", COLOR_MODES, ids=str)
def test_color_mode_values_are_equal_for_blocks_selected_by_ids_or_by_slice(mode, ledger):
    ids = np.array([5, 0, 3, 3], np.uint32)
    whole = mode.keys(ledger, ALL, 16, 100)
    assert mode.keys(ledger, ids, 16, 100).tolist() == whole[ids].tolist()


@pytest.mark.parametrize("theme", [DARK, LIGHT])
@pytest.mark.parametrize("mode", COLOR_MODES, ids=str)
def test_every_color_mode_value_of_a_block_has_a_color_in_each_theme(mode, theme, ledger):
    colors = mode.key_colors(theme)
    for key in mode.keys(ledger, ALL, 16, 100).tolist():
        assert colors[key] != theme.base
    assert PixelTables(mode, theme).solid.shape == (3, len(LEVELS), 768)


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_state_colors_differ_in_lightness(theme):
    def light(color):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    values = sorted(light(getattr(theme, f"block_{name}")) for name in ("free", "active", "cached", "shared"))
    assert all(b - a > 8 for a, b in pairwise(values))


@pytest.mark.parametrize("theme", [DARK, LIGHT])
@pytest.mark.parametrize("ink", ["text", "muted", "accent", "good", "warn", "bad"])
def test_text_colors_have_enough_contrast(theme, ink):
    assert contrast(getattr(theme, ink), theme.panel) >= 4.5


def contrast(first, second):
    """Return the WCAG 2 contrast ratio."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_attention_color_mode_ranks_blocks_by_attention_and_marks_unmeasured_ones(ledger):
    ledger.attention[1:4] = attention_units(np.array([1.0, 0.03, 1e-7], np.float32))
    result = ATTENTION.keys(ledger, ALL, 16, 100).astype(int)
    assert result[0] == modes.FREE
    assert result[1] == modes.COLDEST + modes.ATTENTION_STEPS
    assert modes.COLDEST < result[2] < result[1]
    assert result[3] == modes.COLDEST
    assert result[4] == result[5] == modes.UNMEASURED


def test_attention_keys_mark_blocks_skipped_by_sparse_decode(ledger):
    """Measured attention takes precedence; blocks skipped by all heads have one colour in both cases."""
    ledger.skipped[1:5] = attention_units(np.array([0.0, 0.75, 1.0, 1.0], np.float32))
    ledger.attention[4] = attention_units(np.array([0.5], np.float32))[0]
    result = ATTENTION.keys(ledger, ALL, 16, 100).astype(int)
    assert result[1] == modes.COLDEST + modes.ATTENTION_STEPS
    assert result[2] == modes.COLDEST + modes.ATTENTION_STEPS // 4
    assert result[3] == result[4] == modes.SKIPPED_BY_ALL
    assert result[5] == modes.UNMEASURED
    ledger.attention[2] = attention_units(np.array([1.0], np.float32))[0]
    assert ATTENTION.keys(ledger, ALL, 16, 100)[2] == modes.COLDEST + modes.ATTENTION_STEPS
