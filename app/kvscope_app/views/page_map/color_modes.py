"""Colour modes of the page map. Each is one `ColorMode` in `COLOR_MODES`, from which menus, shortcuts, legends,
tooltips and the names accepted in settings and layouts are derived.

A mode maps each block to a one-byte key, and each key to a colour. Keys are ordered by importance: where several blocks
share a pixel, the highest key is shown. Key 0 means no block, key 1 address space without memory, key 2 a free block.
Imports no widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.ui.theme import Theme, mix, owner_colors
from kvscope_app.views.capability_messages import engine_name, plugin_hint
from kvscope_app.views.page_map.legend_items import LegendSwatch, Scale, ShownItems, common_swatches
from kvscope_app.views.tier_style import TIER_STYLES, tier_color
from kvscope_telemetry.ledger import LOWER_TIERS, STATE_TIERS, BlockState, Ledger, Tier, attention_shares
from kvscope_telemetry.messages.capabilities import Capabilities

Keys = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.uint32] | slice

UNMAPPED: Final = 1
FREE: Final = 2
NUM_KEYS: Final = 256
_HOLLOW_SHARE: Final = 0.66


@dataclass(frozen=True, slots=True, eq=False)
class ColorMode:
    """One way to colour the page map: its colour keys, colours, legend and requirements. `str()` returns its name."""

    name: str
    """Identifier on the button and in menus, settings and layouts; must never change."""
    tip: str
    keys: Callable[[Ledger, Rows, int, int], Keys]
    """Function (ledger, rows, block size, step) that returns the colour key of each block in `rows`, shape (n,).

    `rows` is an array of block ids, shape (n,), or a slice.
    """
    colors: Callable[[Theme], Mapping[int, str]]
    """Function that returns the colour of each key that a block with content can have in a theme."""
    swatches: Callable[[Theme, ShownItems], Sequence[LegendSwatch]] = lambda theme, shown: ()
    scale: Callable[[ShownItems], Scale | None] = lambda shown: None
    is_available: Callable[[Capabilities], bool] = lambda capabilities: True
    needs: str = ""
    """Data that the engine must report for the mode, as text for the user.

    Empty for the KV group mode, which instead needs a model with several KV groups.
    """
    hint: str = ""
    """Instruction for the user on how to make an engine that accepts commands report the data."""
    has_request_colors: bool = False
    """Whether colours identify requests. The legend then keeps one line, because its entries come and go with the
    requests.
    """
    depends_on_step: bool = False
    """Whether keys depend on the current step, so that they change even if no block does."""

    def __str__(self) -> str:
        return self.name

    def why_not(self, capabilities: Capabilities) -> str:
        """Return why blocks of an engine with `capabilities` cannot be coloured by this mode, or "" if they can."""
        if self.is_available(capabilities):
            return ""
        how = f": {self.hint}" if self.hint and capabilities.commands else plugin_hint(capabilities)
        if not self.needs:
            return "This engine has a single KV group"
        return f"{engine_name(capabilities)} does not report {self.needs}{how}"

    def key_colors(self, theme: Theme) -> list[str]:
        colors = [theme.base] * NUM_KEYS
        colors[UNMAPPED] = theme.block_unmapped
        colors[FREE] = theme.block_free
        for key, color in self.colors(theme).items():
            colors[key] = color
        return colors

    def legend(self, theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
        return [*self.swatches(theme, shown), *common_swatches(theme, shown)]


def gradient(stops: tuple[str, ...], share: float) -> str:
    """Return the colour at position `share` (0 to 1) along evenly spaced `stops`."""
    position = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(position), len(stops) - 2)
    return mix(stops[index], stops[index + 1], position - index)


def shades(first: int, stops: tuple[str, ...], num_steps: int) -> dict[int, str]:
    """Return a gradient along evenly spaced `stops` as the colours of keys `first` to `first + num_steps`."""
    return {first + index: gradient(stops, index / num_steps) for index in range(num_steps + 1)}


def hollow(color: str, theme: Theme) -> str:
    """Return the colour for the empty slots of a cell whose filled slots have `color`."""
    return mix(color, theme.block_free, _HOLLOW_SHARE)


HAS_CONTENT: Final = np.isin(np.arange(256), (BlockState.FREE, BlockState.UNMAPPED), invert=True)


def _set_keys_without_content(result: Keys, state: npt.NDArray[np.uint8]) -> Keys:
    """Set the keys of free and unmapped blocks, which have the same colours in every mode. Modifies and returns
    `result`.
    """
    result[state == BlockState.FREE] = FREE
    result[state == BlockState.UNMAPPED] = UNMAPPED
    return result


# Mode "state": active, shared, cached, or in a lower tier.

DISK_CACHED: Final = 3
HOST_CACHED: Final = 4
DISK: Final = 5
"""Colour key of a block on disk that a swapped-out request needs. The key of such a block in host memory is `HOST`."""
HOST: Final = 6
CACHED: Final = 7
ACTIVE: Final = 8
SHARED: Final = 9
UNKNOWN: Final = 10
"""Colour key of a block in a state or tier that only a later protocol version defines."""
_STATE_KEYS: Final = np.full((256, 256), UNKNOWN, np.uint8)
"""Colour key of each combination of tier and state, indexed by [tier, state]."""
_STATE_KEYS[Tier.HBM, :4] = (FREE, ACTIVE, CACHED, UNMAPPED)
_STATE_KEYS[Tier.HOST, :4] = (FREE, HOST, HOST_CACHED, UNMAPPED)
_STATE_KEYS[Tier.DISK, :4] = (FREE, DISK, DISK_CACHED, UNMAPPED)
_STATE_KEYS[Tier.STATES], _STATE_KEYS[Tier.HOST_STATES] = _STATE_KEYS[Tier.HBM], _STATE_KEYS[Tier.HOST]


def _state_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    state, tier = ledger.state[rows], ledger.tier[rows]
    result: Keys = _STATE_KEYS[Tier.HBM][state]
    result[(ledger.ref_count[rows] > 1) & (state == BlockState.ACTIVE)] = SHARED
    is_other_tier = tier != Tier.HBM
    if is_other_tier.any():
        result[is_other_tier] = _STATE_KEYS[tier[is_other_tier], state[is_other_tier]]
    return result


def lower_cached(color: str, theme: Theme) -> str:
    """Return the colour of a cached block in a lower tier whose swapped-out blocks have `color`."""
    return mix(color, theme.block_free, 0.6)


def _state_colors(theme: Theme) -> dict[int, str]:
    host, disk = tier_color(Tier.HOST, theme), tier_color(Tier.DISK, theme)
    return {
        DISK: disk,
        HOST: host,
        DISK_CACHED: lower_cached(disk, theme),
        HOST_CACHED: lower_cached(host, theme),
        CACHED: theme.block_cached,
        ACTIVE: theme.block_active,
        SHARED: theme.block_shared,
        UNKNOWN: theme.muted,
    }


def _state_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    unknown = [LegendSwatch(theme.muted, "unknown")] if shown.has_unknown else []
    if shown.has_only_prefixes:
        return [LegendSwatch(theme.block_cached, "cached prefix"), *_prefix_swatches(theme, shown), *unknown]
    if shown.has_reserved:  # no block is shared or cached in this case
        empty_slots = LegendSwatch(hollow(theme.block_active, theme), "held, empty slots")
        return [LegendSwatch(theme.block_active, "active"), empty_slots, *unknown]
    pool = [(theme.block_active, "active"), (theme.block_shared, "shared"), (theme.block_cached, "cached")]
    return [LegendSwatch(*each) for each in pool] + _lower_swatches(theme, shown) + unknown


def _lower_tiers(theme: Theme, shown: ShownItems) -> list[tuple[str, str]]:
    tiers = [tier for tier in LOWER_TIERS if tier in shown.tiers]
    return list(dict.fromkeys((tier_color(tier, theme), TIER_STYLES[tier].short_name) for tier in tiers))


def _lower_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    result = []
    for color, word in _lower_tiers(theme, shown):
        result += [LegendSwatch(color, f"{word}: swapped"), LegendSwatch(lower_cached(color, theme), f"{word}: cached")]
    return result


def _prefix_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    tiers = _lower_tiers(theme, shown)
    return [LegendSwatch(lower_cached(color, theme), f"{word}: cached prefix") for color, word in tiers]


STATE: Final = ColorMode(
    "state",
    "State of each block: active, shared, cached or free",
    _state_keys,
    _state_colors,
    _state_swatches,
)


# Mode "owner": the request that owns a block.

OWNER_CACHED: Final = 3
OWNER_ACTIVE: Final = 128
NUM_OWNER_KEYS: Final = 96


def _owner_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    state = ledger.state[rows]
    result = (ledger.owner[rows] % NUM_OWNER_KEYS).astype(np.uint8)
    result += np.where(state == BlockState.ACTIVE, np.uint8(OWNER_ACTIVE), np.uint8(OWNER_CACHED))
    return _set_keys_without_content(result, state)


def _owner_colors(theme: Theme) -> dict[int, str]:
    colors = owner_colors(theme)
    active = {OWNER_ACTIVE + index: color for index, color in enumerate(colors)}
    cached = {OWNER_CACHED + index: mix(color, theme.block_free, 0.62) for index, color in enumerate(colors)}
    return active | cached


def _owner_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    colors = owner_colors(theme)
    return [LegendSwatch(colors[number % len(colors)], f"#{number}") for number in shown.owners]


OWNER: Final = ColorMode(
    "owner",
    "Which request owns it",
    _owner_keys,
    _owner_colors,
    _owner_swatches,
    is_available=lambda capabilities: capabilities.owners,
    needs="block owners",
    has_request_colors=True,
)


# Mode "fill": share of slots that hold a token.

FILL_FULL: Final = 3
FILL_STEPS: Final = 100
"""Number of colour steps from a full block (key `FILL_FULL`) to an empty block in use, which has the highest key so
that wasted memory stays visible.
"""


def _fill_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    filled = np.minimum(ledger.filled[rows], block_size)
    # a recurrent state counts as full, whatever its number of tokens
    filled[np.isin(ledger.tier[rows], STATE_TIERS)] = block_size
    by_filled = FILL_FULL + np.rint((1 - np.arange(block_size + 1) / block_size) * FILL_STEPS)
    result = by_filled.astype(np.uint8)[filled]
    return _set_keys_without_content(result, ledger.state[rows])


def _fill_stops(theme: Theme) -> tuple[str, ...]:
    return (mix(theme.block_active, theme.base, 0.45), theme.block_active, theme.block_cached, theme.bad)


def _fill_colors(theme: Theme) -> dict[int, str]:
    return shades(FILL_FULL, _fill_stops(theme), FILL_STEPS)


FILL_SCALE: Final[Scale] = (_fill_stops, "full", "empty slots")
FILL: Final = ColorMode(
    "fill",
    "Filled slots",
    _fill_keys,
    _fill_colors,
    scale=lambda shown: FILL_SCALE,
    is_available=lambda capabilities: capabilities.filled,
    needs="fill of blocks",
)


# Mode "sharing": number of requests that hold a block.

UNHELD: Final = 3
ONE_HOLDER: Final = 4
MAX_HOLDERS: Final = 16


def _sharing_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    holders = np.clip(ledger.ref_count[rows], 0, MAX_HOLDERS)
    result = (holders + UNHELD).astype(np.uint8)
    return _set_keys_without_content(result, ledger.state[rows])


def _sharing_stops(theme: Theme) -> tuple[str, ...]:
    many_holders = "#fff4c2" if theme.is_dark else "#4a0d3c"
    return (theme.block_active, theme.block_shared, many_holders)


def _unheld_color(theme: Theme) -> str:
    return mix(theme.block_cached, theme.block_free, 0.62)


def _sharing_colors(theme: Theme) -> dict[int, str]:
    steps = MAX_HOLDERS - 1
    colors = [gradient(_sharing_stops(theme), (index / steps) ** 0.6) for index in range(steps + 1)]
    return {UNHELD: _unheld_color(theme)} | {ONE_HOLDER + index: color for index, color in enumerate(colors)}


SHARING: Final = ColorMode(
    "sharing",
    "Number of requests that hold it",
    _sharing_keys,
    _sharing_colors,
    lambda theme, shown: [LegendSwatch(_unheld_color(theme), "cached, not held")],
    lambda shown: (_sharing_stops, "1 request", "16 or more"),
    is_available=lambda capabilities: capabilities.ref_counts,
    needs="reference counts",
)


# Mode "age": steps since a block was last used.

OLDEST: Final = 3
AGE_STEPS: Final = 120
_MAX_AGE: Final = (1 << 16) - 1
_AGE_DOUBLINGS: Final = 14.0
"""Number of times that a block's age doubles over the range of colours. Each doubling is an equal step in colour."""
_KEY_BY_AGE: Final = (
    OLDEST + np.clip(AGE_STEPS * (1 - np.log2(np.arange(_MAX_AGE + 1) + 1.0) / _AGE_DOUBLINGS), 0, AGE_STEPS)
).astype(np.uint8)


def _age_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    last_used = ledger.last_used_step[rows]
    current_step = np.uint32(step & 0xFFFFFFFF)
    age = np.minimum(current_step - np.minimum(last_used, current_step), np.uint32(_MAX_AGE))
    result: Keys = _KEY_BY_AGE[age]
    return _set_keys_without_content(result, ledger.state[rows])


def _age_stops(theme: Theme) -> tuple[str, ...]:
    if theme.is_dark:
        return ("#2b2f5e", "#6a3d9a", "#d2527f", "#ffb454", "#fff3b0")
    return ("#cfd6ea", "#a9a3d8", "#a9559f", "#a32a55", "#5c0f1f")


def _age_colors(theme: Theme) -> dict[int, str]:
    return shades(OLDEST, _age_stops(theme), AGE_STEPS)


AGE: Final = ColorMode(
    "age",
    "Time since last use",
    _age_keys,
    _age_colors,
    scale=lambda shown: (_age_stops, "long unused", "used now"),
    is_available=lambda capabilities: capabilities.last_used,
    needs="last use of blocks",
    depends_on_step=True,
)


# Mode "attention": share of attention on a block.

UNMEASURED: Final = 3
SKIPPED_BY_ALL: Final = 4
"""Colour key of a block that no sparse layer and head selected in the last decode."""
COLDEST: Final = 5
ATTENTION_STEPS: Final = 120
ATTENTION_HALVINGS: Final = 13
"""Number of times that a block's share of attention halves over the range of colours. Each halving is an equal step in
colour; shares of about 0.01 % or less have the coldest colour.
"""


def _attention_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    """Return keys by the block's share of attention. Where attention was not measured, the share of sparse layers and
    heads that selected the block decides.
    """
    units, skipped = ledger.attention[rows], ledger.skipped[rows]
    halvings = -np.log2(np.maximum(attention_shares(units), 2.0**-ATTENTION_HALVINGS))
    levels = np.where(units == 0, 1 - attention_shares(skipped), 1 - halvings / ATTENTION_HALVINGS)
    result = (COLDEST + np.rint(ATTENTION_STEPS * levels)).astype(np.uint8)
    result[(units == 0) & (skipped == 0)] = UNMEASURED
    result[attention_shares(skipped) >= 1.0] = SKIPPED_BY_ALL
    return _set_keys_without_content(result, ledger.state[rows])


def _attention_stops(theme: Theme) -> tuple[str, ...]:
    if theme.is_dark:
        return ("#1c3f63", "#2f7fa3", "#c9b458", "#f2803a", "#fff1cf")
    return ("#cfe3f2", "#86b6d6", "#e0b04a", "#d2541b", "#5c0f0f")


def _unmeasured_color(theme: Theme) -> str:
    return mix(theme.muted, theme.block_free, 0.7)


def _skipped_color(theme: Theme) -> str:
    return mix(_attention_stops(theme)[0], theme.block_free, 0.6)


def _attention_colors(theme: Theme) -> dict[int, str]:
    fixed_colors = {UNMEASURED: _unmeasured_color(theme), SKIPPED_BY_ALL: _skipped_color(theme)}
    return fixed_colors | shades(COLDEST, _attention_stops(theme), ATTENTION_STEPS)


def _attention_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    skipped = [LegendSwatch(_skipped_color(theme), "skipped by all")] if shown.has_sparse_attention else []
    return [*skipped, LegendSwatch(_unmeasured_color(theme), "not measured")]


def _attention_scale(shown: ShownItems) -> Scale:
    if shown.has_sparse_attention and not shown.has_measured_attention:
        return _attention_stops, "selected by few heads", "by all"
    return _attention_stops, "0.01 %", "all attention"


ATTENTION: Final = ColorMode(
    "attention",
    "Share of its request's attention on it, or skipped by sparse decode, at the last measurement",
    _attention_keys,
    _attention_colors,
    _attention_swatches,
    _attention_scale,
    is_available=lambda capabilities: capabilities.attention or capabilities.sparse_decode,
    needs="attention per block",
    hint="start it with --page-heat 16 to measure it",
)

# Mode "group": the KV group whose KV a block holds.

GROUP_CACHED: Final = 3
GROUP_ACTIVE: Final = 128
NUM_GROUP_KEYS: Final = 24
"""Number of distinct colours of KV groups. Groups with higher numbers reuse them."""


def _group_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    state = ledger.state[rows]
    result: Keys = ledger.group[rows] % np.uint8(NUM_GROUP_KEYS)
    result += np.where(state == BlockState.ACTIVE, np.uint8(GROUP_ACTIVE), np.uint8(GROUP_CACHED))
    return _set_keys_without_content(result, state)


def _group_colors(theme: Theme) -> dict[int, str]:
    colors = owner_colors(theme)[:NUM_GROUP_KEYS]
    active = {GROUP_ACTIVE + index: color for index, color in enumerate(colors)}
    cached = {GROUP_CACHED + index: mix(color, theme.block_free, 0.62) for index, color in enumerate(colors)}
    return active | cached


def _group_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    colors = owner_colors(theme)
    return [
        LegendSwatch(colors[number % NUM_GROUP_KEYS], f"{number}: {name}") for number, name in enumerate(shown.groups)
    ]


GROUP: Final = ColorMode(
    "group",
    "KV group (layers with the same KV layout), cached blocks duller",
    _group_keys,
    _group_colors,
    _group_swatches,
    is_available=lambda capabilities: capabilities.groups,
)


# Mode "eviction": the order in which cached blocks are evicted.

IN_USE: Final = 3
NO_ORDER: Final = 4
"""Colour key of a cached block that is pinned, or for which the engine reports no eviction order."""
EVICTED_LAST: Final = 5
EVICTION_STEPS: Final = 120


def _eviction_keys(ledger: Ledger, rows: Rows, block_size: int, step: int) -> Keys:
    order, state, tier = ledger.eviction_order[rows], ledger.state[rows], ledger.tier[rows]
    result = np.where(state == BlockState.CACHED, NO_ORDER, IN_USE).astype(np.uint8)
    is_queued = (ledger.state == BlockState.CACHED) & (ledger.eviction_order != 0)
    for current_tier in np.unique(tier[order != 0]):  # the order is counted per tier
        queued_order = ledger.eviction_order[is_queued & (ledger.tier == current_tier)]
        first, last = (int(queued_order.min()), int(queued_order.max())) if queued_order.size else (0, 0)
        is_in_tier = (order != 0) & (tier == current_tier)
        share_of_order = (last - np.clip(order[is_in_tier], first, last).astype(np.int64)) / max(last - first, 1)
        result[is_in_tier] = EVICTED_LAST + np.rint(EVICTION_STEPS * share_of_order)
    return _set_keys_without_content(result, state)


def _eviction_stops(theme: Theme) -> tuple[str, ...]:
    return (mix(theme.block_cached, theme.base, 0.6), theme.block_cached, theme.warn, theme.bad)


def _in_use_color(theme: Theme) -> str:
    return mix(theme.block_active, theme.base, 0.55)


def _no_order_color(theme: Theme) -> str:
    return mix(theme.muted, theme.base, 0.6)


def _eviction_colors(theme: Theme) -> dict[int, str]:
    return {IN_USE: _in_use_color(theme), NO_ORDER: _no_order_color(theme)} | shades(
        EVICTED_LAST, _eviction_stops(theme), EVICTION_STEPS
    )


EVICTION: Final = ColorMode(
    "eviction",
    "Order in which cached blocks are evicted",
    _eviction_keys,
    _eviction_colors,
    lambda theme, shown: [
        LegendSwatch(_in_use_color(theme), "in use"),
        LegendSwatch(_no_order_color(theme), "protected or not reported"),
    ],
    lambda shown: (_eviction_stops, "evicted last", "evicted next"),
    is_available=lambda capabilities: capabilities.eviction_order,
    needs="the order of eviction",
    depends_on_step=True,
)

COLOR_MODES: Final = (STATE, OWNER, FILL, SHARING, AGE, ATTENTION, GROUP, EVICTION)
MODE_NAMES: Final = tuple(mode.name for mode in COLOR_MODES)


def mode_named(name: str) -> ColorMode:
    """Return the colour mode called `name`, or the default `STATE` if there is none."""
    return next((mode for mode in COLOR_MODES if mode.name == name), STATE)
