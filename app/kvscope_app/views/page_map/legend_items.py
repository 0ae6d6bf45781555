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
"""(colour stops, label of the low end, label of the high end)."""


class LegendSwatch(NamedTuple):
    """Colour and label of a legend entry, drawn as a plain square, as a flash with its glyph, or with a pin's
    corner."""

    color: str
    label: str
    flash: FlashKind | None = None
    is_pin: bool = False


@dataclass(frozen=True, slots=True)
class ShownItems:
    """Features of an engine that the legend must explain, besides active, shared, cached and free blocks."""

    tiers: frozenset[Tier] = frozenset()
    """Tiers present, except the device pool's (`Tier.HBM`)."""
    unmapped: bool = False
    reserved: bool = False
    """Whether the allocator reserves blocks before they hold tokens."""
    flashes: tuple[FlashKind, ...] = ()
    """Kinds of flashes seen so far."""
    unknown: bool = False
    """Whether some blocks are in a state of a later protocol version."""
    prefixes_alone: bool = False
    """Whether blocks are known only while their prefix is cached; the engine does not report the holders of blocks."""
    choices: bool = False
    """Whether decodes select among blocks (sparse attention)."""
    attention: bool = True
    """Whether attention is measured."""
    pins: bool = False
    """Whether any block is pinned."""
    owners: tuple[int, ...] = ()
    """Numbers of the running requests that hold the most blocks, ascending, at most `MAX_OWNERS`."""
    num_more_owners: int = 0
    """Number of other requests that hold blocks."""
    groups: tuple[str, ...] = ()
    """Name of each KV group."""
    may_flash: tuple[FlashKind, ...] = ()
    """Kinds of flashes that may occur. Space is reserved for them, so that the map does not move when they do."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to explain besides the colours of the mode, so that one line suffices."""
        has_lower = not self.tiers.isdisjoint(LOWER_TIERS)
        return not (has_lower or self.unmapped or self.reserved or self.flashes or self.unknown or self.prefixes_alone)


MAX_OWNERS: Final = 24
"""More would not fit in any legend, and would hardly have distinct colours."""
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
    """Return what the legend must explain for `mirror`. `flashes`: kinds seen so far."""
    if mirror.hello is None:
        return ShownItems()
    tiers = [tier for tier in mirror.hello.cache.rows_by_tier.present if tier is not Tier.HBM]
    kinds = tuple(kind for kind in MOVES if kind in flashes)
    reserved = mirror.hello.cache.allocator in RESERVING
    unknown = any(mirror.count(BlockState.UNKNOWN, tier) for tier in Tier)
    capabilities, cache = mirror.capabilities, mirror.hello.cache
    return ShownItems(
        tiers=frozenset(tiers),
        unmapped=mirror.count(BlockState.UNMAPPED) > cache.num_reserved_blocks,
        reserved=reserved,
        flashes=kinds,
        unknown=unknown,
        prefixes_alone=not capabilities.free_rows,
        choices=capabilities.sparse_decode,
        attention=capabilities.attention,
        groups=tuple(map(group_name, cache.groups)),
    )


def may_flash(mirror: Mirror) -> tuple[FlashKind, ...]:
    """Return the kinds for which blocks of this engine can flash."""
    if mirror.hello is None or mirror.hello.cache.allocator in RESERVING:
        return ()
    if not mirror.capabilities.free_rows:
        return (FlashKind.EVICTED,)
    has_lower = any(tier in LOWER_TIERS for tier in mirror.hello.cache.rows_by_tier.present)
    return MOVES if has_lower else (FlashKind.EVICTED, FlashKind.COPIED)


def owners_in(mirror: Mirror) -> tuple[tuple[int, ...], int]:
    """Return the numbers of the requests that hold the most blocks of the pool, and how many more hold any."""
    ledger, size = mirror.ledger, mirror.num_blocks
    numbers, held = np.unique(ledger.owner[:size][ledger.state[:size] == BlockState.ACTIVE], return_counts=True)
    numbers, held = numbers[numbers > 0], held[numbers > 0]
    most = np.sort(numbers[np.argsort(-held, kind="stable")[:MAX_OWNERS]])
    return tuple(most.tolist()), numbers.size - most.size


def common_swatches(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    """Return the swatches that all modes share: blocks without content, marks and flashes."""
    pins = [LegendSwatch(theme.block_free, "pinned", is_pin=True)] if shown.pins else []
    return [*_without_content(theme, shown), *pins, *_flashes(theme, shown)]


def _without_content(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    if shown.prefixes_alone:
        return [LegendSwatch(theme.block_free, "unused or unknown")]
    unmapped = [LegendSwatch(theme.base, "no memory behind it")] if shown.unmapped else []
    return [LegendSwatch(theme.block_free, "free"), *unmapped]


def _flashes(theme: Theme, shown: ShownItems) -> list[LegendSwatch]:
    return [LegendSwatch(getattr(theme, f"flash_{k.name.lower()}"), _FLASH_LABELS[k], k) for k in shown.flashes]
