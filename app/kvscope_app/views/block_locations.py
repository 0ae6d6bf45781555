"""Locations of ledger rows (blocks of the pool, slots of a lower tier) and names of KV groups. Imports no Qt.

The ledger has the pool's rows first, then those of host memory, of the disk, and of recurrent states. Displayed numbers
count the rows of each tier from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, KVGroup
from kvscope_telemetry.mirror.mirror import Mirror


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Location of a ledger row: its tier, and its number within the tier."""

    tier: Tier
    number: int
    slot: int = -1
    """Slot of an engine that divides its cache into slots (llama.cpp), else -1.

    For such an engine, `tokens` has the positions of the first and last token of the slot that the row can hold.
    """
    tokens: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """Name such as `Block 7`, `Host block 12` or `Slot 1, tokens 32 to 63`."""
        if self.slot >= 0:
            return f"Slot {self.slot}, tokens {count(self.tokens[0])} to {count(self.tokens[1])}"
        return f"{TIER_STYLES[self.tier].noun} {count(self.number)}"

    @property
    def short(self) -> str:
        """Name for a small cell of the page map, such as `7` or `H12`."""
        return f"{TIER_STYLES[self.tier].letter}{self.number}"


def section_sizes(cache: CacheInfo) -> dict[Tier, int]:
    """Return the number of ledger rows of each tier that the engine has, in the ledger's order."""
    return {tier: len(rows) for tier, rows in cache.rows_by_tier.present.items()}


MAX_SLOT_SECTIONS: Final = 16
_GROUP_KINDS: Final = {
    "full": "full attention",
    "window": "sliding window",
    "chunked": "chunked attention",
    "latent": "latent attention (MLA)",
    "indexed": "sparse attention with an indexer (DSA)",
    "state": "recurrent state",
    "cross": "cross attention",
    "chunks": "chunks of a store",
    "prefixes": "prefixes only, without keys and values",
    "": "kind not reported",
}


def group_name(group: KVGroup) -> str:
    """Return a description such as `sliding window of 128, 5 layers`."""
    text = _GROUP_KINDS.get(group.kind, group.kind)
    text += f" of {count(group.window)}" if group.window else ""
    text += f", {plural(group.num_layers, 'layer')}" if group.num_layers else ""
    text += _draft_text(group)
    share = group.index_bytes / group.block_bytes if group.block_bytes else 0.0
    return text + (f", {share:.0%} of it the indexers' keys" if share else "")


def _draft_text(group: KVGroup) -> str:
    if not group.num_draft_layers:
        return ""
    if group.num_draft_layers == group.num_layers:
        return " of a draft model"
    number = "some" if group.num_draft_layers < 0 else count(group.num_draft_layers)
    return f", {number} of them a draft model's"


def map_sections(cache: CacheInfo) -> tuple[int, ...]:
    """Return the number of rows of each section of the page map; empty if the map has a single section.

    The sections are slots if the engine has 2 to 16 slots and no lower tiers. Otherwise, they are tiers.
    """
    sizes = tuple(section_sizes(cache).values())
    num_slots = cache.num_blocks // cache.slot_blocks if cache.slot_blocks else 0
    if len(sizes) == 1 and 1 < num_slots <= MAX_SLOT_SECTIONS:
        sizes = (cache.slot_blocks,) * num_slots
    return sizes if len(sizes) > 1 else ()


def locate_block(cache: CacheInfo, row: int) -> BlockLocation:
    """Return the location of ledger row `row` (at least 0).

    Rows past `cache.num_rows` belong to a tier of a later protocol version.
    """
    rows = cache.rows_by_tier
    tier = rows.tier_of(row)
    if tier is Tier.UNKNOWN:
        return BlockLocation(tier, row - rows.num_rows)
    if tier is Tier.HBM and cache.slot_blocks:
        slot, block_index = divmod(row, cache.slot_blocks)
        first_token = block_index * cache.block_size
        return BlockLocation(tier, row, slot, (first_token, first_token + cache.block_size - 1))
    return BlockLocation(tier, row - rows[tier].start)


def tier_title(tier: Tier, device: DeviceInfo) -> str:
    if tier is Tier.HBM:
        return "GPU memory" if device.kind == "cuda" else "Memory"
    return TIER_STYLES[tier].title


def is_swapped_out(mirror: Mirror, number: int) -> bool:
    """Whether request `number` is preempted and has blocks in a lower tier."""
    row = mirror.requests.row_of(number)
    if row is None or mirror.requests.state[row] != RequestState.PREEMPTED:
        return False
    return bool(np.any(mirror.requests.blocks(number) >= mirror.num_blocks))


def tier_counts_text(num_by_tier: dict[Tier, int], noun: str = "block") -> str:
    """Return a text such as `62 blocks in host memory, 3 on disk`. Pool blocks and recurrent states are not counted."""
    lower = [(number, where) for tier, number in num_by_tier.items() if number and (where := TIER_STYLES[tier].where)]
    texts = [f"{count(number)} {where}" for number, where in lower]
    return ", ".join([f"{plural(lower[0][0], noun)} {lower[0][1]}", *texts[1:]]) if lower else ""
