"""What each tier is called and which colour its rows have, in every view. Knows no Qt.

Which rows a tier has is said by `CacheInfo.rows_by_tier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_app.look.theme import Theme, mix
from kvscope_telemetry.ledger import Tier


@dataclass(frozen=True, slots=True)
class TierStyle:
    """Names of one tier, and the colour of its rows."""

    noun: str
    """A row: `Host block`."""
    letter: str
    """Before a row's number within the tier: `H` in `H12`."""
    memory: str
    """Where its bytes are: `host memory`."""
    title: str = ""
    """Name of the tier; empty for the pool, whose name depends on the device, and for an unknown tier."""
    where: str = ""
    """Where its blocks are: `in host memory`; empty where that is not said."""
    word: str = ""
    """Name in legends and cells, of tiers of blocks and of `HOST_STATES`: `host`."""
    search_words: tuple[str, ...] = ()
    """Words before a number that name a row of this tier in a search."""
    color: str = ""
    """Name of the colour in `Theme` of rows that requests need; empty where the colour depends on a row's state."""


TIER_STYLES: Final = {
    Tier.HBM: TierStyle("Block", "", "device memory", word="memory", search_words=("block",)),
    Tier.HOST: TierStyle(
        "Host block", "H", "host memory", "Host memory", "in host memory", "host", ("h", "host"), "block_host"
    ),
    Tier.DISK: TierStyle("Disk block", "D", "disk", "Disk", "on disk", "disk", ("d", "disk"), "block_disk"),
    Tier.STATES: TierStyle("State", "S", "device memory", "Recurrent states", search_words=("s", "state")),
    Tier.HOST_STATES: TierStyle(
        "Host state",
        "HS",
        "host memory",
        "Recurrent states in host memory",
        word="host",
        search_words=("hs", "host state"),
        color="block_host",
    ),
    Tier.UNKNOWN: TierStyle("Place", "?", "an unknown tier", where="elsewhere", word="unknown tier", color="muted"),
}


def tier_color(tier: Tier, theme: Theme) -> str:
    """The colour of rows of a lower tier that requests need, as `#rrggbb`."""
    return str(getattr(theme, TIER_STYLES[tier].color))


def distinct_tier_colors(theme: Theme) -> dict[Tier, str]:
    """A colour for each tier, where tiers and not states of blocks are told apart."""
    host = tier_color(Tier.HOST, theme)
    return {
        Tier.HBM: theme.block_active,
        Tier.HOST: host,
        Tier.DISK: tier_color(Tier.DISK, theme),
        Tier.STATES: theme.block_shared,
        Tier.HOST_STATES: mix(host, theme.block_shared, 0.5),
    }
