"""Legend entries of the page map other than the colours of a mode: tiers, marks and flashes. Imports no Qt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvscope_app.ui.theme import Theme
from kvscope_app.views.block_locations import group_name
from kvscope_app.views.page_map.drawing.flash_kinds import MOVES, FlashKind
from kvscope_telemetry.ledger import LOWER_TIERS, BlockState, Tier
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.pool_use import RESERVING

Scale = tuple[Callable[[Theme], tuple[str, ...]], str, str]
"""Colour scale of a legend: (colour stops, label of the low end, label of the high end)."""


class LegendSwatch(NamedTuple):
    """Colour and label of a legend entry. The colour is drawn as a plain square, as a flash with its glyph, or with a
    pin's corner mark.
    """

    color: str
    label: str
    flash: FlashKind | None = None
    is_pin: bool = False


@dataclass(frozen=True, slots=True)
class ShownItems:
    """Items that the legend explains in addition to active, shared, cached and free blocks."""

    tiers: frozenset[Tier] = frozenset()
    """Tiers in which the engine has blocks, except the device pool (`Tier.HBM`)."""
    has_unmapped: bool = False
    has_reserved: bool = False
    """Whether the allocator reserves blocks before they hold tokens."""
    flashes: tuple[FlashKind, ...] = ()
    has_unknown: bool = False
    has_only_prefixes: bool = False
    """Whether blocks are known only while their prefix is cached, because the engine does not report who holds them."""
    has_sparse_attention: bool = False
    has_measured_attention: bool = True
    has_pins: bool = False
    owners: tuple[int, ...] = ()
    """Numbers of the running requests that hold the most blocks, at most `MAX_OWNERS`, ascending."""
    num_more_owners: int = 0
    groups: tuple[str, ...] = ()
    may_flash: tuple[FlashKind, ...] = ()
    """Kinds of flashes that can occur. The legend reserves space for them, so that the first flash does not move the
    map.
    """

    @property
    def is_plain(self) -> bool:
        """Whether the legend explains only the mode's own colours, so that one line suffices."""
        has_lower_tiers = not self.tiers.isdisjoint(LOWER_TIERS)
        has_other_blocks = self.has_unmapped or self.has_reserved or self.has_unknown or self.has_only_prefixes
        return not (has_lower_tiers or has_other_blocks or self.flashes)


MAX_OWNERS: Final = 24
"""Maximum number of requests in a legend. More would not fit, and their colours would be hard to distinguish."""
_FLASH_LABELS: Final = {
    FlashKind.EVICTED: "evicted",
    FlashKind.COPIED: "copied",
    FlashKind.SAVED: "saved",
    FlashKind.LOADED: "loaded",
}
FLASH_MEANINGS: Final = {
    FlashKind.EVICTED: "evicted from the prefix cache",
    FlashKind.COPIED: "copied, on write from a shared block, or from another recurrent state",
    FlashKind.SAVED: "written to a lower tier",
    FlashKind.LOADED: "loaded from a lower tier",
}


def shown_in(mirror: Mirror, flashes: Collection[FlashKind]) -> ShownItems:
    """Return what the legend must explain for the state in `mirror`, given the kinds of flashes seen so far."""
    if mirror.hello is None:
        return ShownItems()
    tiers = [tier for tier in mirror.hello.cache.rows_by_tier.present if tier is not Tier.HBM]
    kinds = tuple(kind for kind in MOVES if kind in flashes)
    reserved = mirror.hello.cache.allocator in RESERVING
    unknown = any(mirror.count(BlockState.UNKNOWN, tier) for tier in Tier)
    capabilities, cache = mirror.capabilities, mirror.hello.cache
    return ShownItems(
        tiers=frozenset(tiers),
        has_unmapped=mirror.count(BlockState.UNMAPPED) > cache.num_reserved_blocks,
        has_reserved=reserved,
        flashes=kinds,
        has_unknown=unknown,
        has_only_prefixes=not capabilities.free_rows,
        has_sparse_attention=capabilities.sparse_decode,
        has_measured_attention=capabilities.attention,
        groups=tuple(map(group_name, cache.groups)),
    )


def may_flash(mirror: Mirror) -> tuple[FlashKind, ...]:
    if mirror.hello is None or mirror.hello.cache.allocator in RESERVING:
        return ()
    if not mirror.capabilities.free_rows:
        return (FlashKind.EVICTED,)
    has_lower = any(tier in LOWER_TIERS for tier in mirror.hello.cache.rows_by_tier.present)
    return MOVES if has_lower else (FlashKind.EVICTED, FlashKind.COPIED)


def owners_in(mirror: Mirror) -> tuple[tuple[int, ...], int]:
    """Return the numbers of the requests that hold the most blocks of the pool, and the number of other requests with
    blocks.
    """
    ledger, size = mirror.ledger, mirror.num_blocks
    numbers, num_held = np.unique(ledger.owner[:size][ledger.state[:size] == BlockState.ACTIVE], return_counts=True)
    numbers, num_held = numbers[numbers > 0], num_held[numbers > 0]
    largest = np.sort(numbers[np.argsort(-num_held, kind="stable")[:MAX_OWNERS]])
    return tuple(largest.tolist()), numbers.size - largest.size


def common_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    pins = [LegendSwatch(theme.block_free, "pinned", is_pin=True)] if shown.has_pins else []
    return [*_without_content(theme, shown), *pins, *_flashes(theme, shown)]


def _without_content(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    if shown.has_only_prefixes:
        return [LegendSwatch(theme.block_free, "unused or unknown")]
    unmapped = [LegendSwatch(theme.base, "no memory behind it")] if shown.has_unmapped else []
    return [LegendSwatch(theme.block_free, "free"), *unmapped]


def _flashes(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    return [LegendSwatch(getattr(theme, f"flash_{k.name.lower()}"), _FLASH_LABELS[k], k) for k in shown.flashes]
