"""Names and colours of the KV cache tiers, used by all views. Imports no Qt.

`CacheInfo.rows_by_tier` defines which rows of the block ledger belong to a tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_app.ui.theme import Theme, mix
from kvscope_telemetry.ledger import Tier


@dataclass(frozen=True, slots=True)
class TierStyle:
    noun: str
    """Noun for a block or recurrent state in the tier, such as `Host block`."""
    letter: str
    """Letter before a block's number in the tier, such as `H` in `H12`."""
    memory: str
    """Memory that stores the tier's blocks, such as `host memory`."""
    title: str = ""
    """Name of the tier; "" for the pool, whose name depends on the device, and for an unknown tier."""
    where: str = ""
    """Location of the tier's blocks as part of a sentence, such as `in host memory`; "" if texts about these
    blocks do not mention a location.
    """
    short_name: str = ""
    """Short name in legends and cells, such as `host`; "" for recurrent states on the device."""
    search_words: tuple[str, ...] = ()
    """Words that the user can type before a block number of this tier in a search."""
    color: str = ""
    """Name of the theme colour of blocks in use by requests; "" if the colour depends on a block's state."""


TIER_STYLES: Final = {
    Tier.HBM: TierStyle("Block", "", "device memory", short_name="memory", search_words=("block",)),
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
        short_name="host",
        search_words=("hs", "host state"),
        color="block_host",
    ),
    Tier.UNKNOWN: TierStyle(
        "Place", "?", "an unknown tier", where="elsewhere", short_name="unknown tier", color="muted"
    ),
}


def tier_color(tier: Tier, theme: Theme) -> str:
    """Return the colour, `#rrggbb`, of a lower tier's blocks that are in use by requests."""
    return str(getattr(theme, TIER_STYLES[tier].color))


def distinct_tier_colors(theme: Theme) -> dict[Tier, str]:
    """Return a distinct colour for each tier, for pictures that show tiers instead of block states."""
    host = tier_color(Tier.HOST, theme)
    return {
        Tier.HBM: theme.block_active,
        Tier.HOST: host,
        Tier.DISK: tier_color(Tier.DISK, theme),
        Tier.STATES: theme.block_shared,
        Tier.HOST_STATES: mix(host, theme.block_shared, 0.5),
    }
