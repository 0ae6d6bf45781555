"""Facts about one block as text, read from a mirror. Imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvscope_app.session.block_texts.session_texts import lookup_of
from kvscope_app.ui.number_text import UNKNOWN, count, percent, plural
from kvscope_app.views.block_locations import group_name, is_swapped_out, locate_block
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.block_texts.block_texts import BlockTextLookup
from kvscope_telemetry.ledger import (
    LOWER_TIERS,
    NO_OWNER,
    STATE_TIERS,
    BlockState,
    Ledger,
    Tier,
    attention_share,
    skipped_share,
)
from kvscope_telemetry.messages.validity import MAX_BLOCK_SIZE
from kvscope_telemetry.mirror.last_use import last_used_step
from kvscope_telemetry.mirror.mirror import Mirror

MAX_HOLDERS_NAMED: Final = 4
_STATES: Final = {
    BlockState.FREE: "free",
    BlockState.ACTIVE: "active",
    BlockState.CACHED: "cached",
    BlockState.UNMAPPED: "unmapped",
    BlockState.UNKNOWN: "unknown",
}
_EMPTY: Final = {
    "free": "Empty; available to the next request.",
    "unmapped": "Address space without memory yet: free of cost until tokens arrive.",
    "reserved": "Reserved by the engine: a placeholder in block tables for released blocks.",
}
_NO_KNOWN_BLOCK: Final = "No known block here. This engine reports blocks only while their prefix is cached."
_EMPTY_LOWER_ROW: Final = "Empty, until a block is swapped out or moved down."


@dataclass(frozen=True, slots=True)
class BlockFacts:
    block: int
    title: str
    state: str
    """State as text: "free", "active", "cached", "shared", "unmapped", "reserved", "swapped out", "not assigned" or
    "unknown".
    """
    color: str
    """Name of a theme colour, for example "block_active"."""
    rows: tuple[tuple[str, str], ...]
    """(label, value) pairs, most informative first."""
    holders: tuple[int, ...]
    """Numbers of the requests whose block tables contain the block, at most `MAX_HOLDERS_NAMED`."""
    owner: int | None
    """Number of the request that wrote the block; None if unknown, or if the block has no content."""
    text_lookup: BlockTextLookup | None
    """Lookup key of the text of the block's tokens; None if the block has no tokens."""

    is_state: bool
    """Whether the block is a recurrent state instead of KV of tokens."""
    empty_text: str
    """Explanation for a block without content, otherwise ""."""

    @property
    def is_cached_in_lower_tier(self) -> bool:
        """Whether this is a cached prefix in a lower tier, which is drawn duller than a swapped-out block there."""
        return self.state == "cached" and any(self.color == style.color for style in TIER_STYLES.values())

    @property
    def sentence(self) -> str:
        return ", ".join([f"{self.title}: {self.state}", *(f"{k.lower()} {v}" for k, v in self.rows)])


def block_facts(mirror: Mirror, block: int, block_size: int) -> BlockFacts:
    """Return facts about the block with index `block`, which must be in [0, ledger.num_blocks)."""
    assert mirror.hello is not None, "there are blocks only once there is an engine"
    ledger = mirror.ledger
    location = locate_block(mirror.hello.cache, block)
    if ledger.tier[block] == Tier.UNKNOWN:  # rows of unknown tiers follow those on disk
        location = replace(location, tier=Tier.UNKNOWN)
    state = "reserved" if block < mirror.hello.cache.num_reserved_blocks else _state_name(ledger, block)
    capabilities = mirror.capabilities
    owner = int(ledger.owner[block]) if capabilities.owners else NO_OWNER
    has_content = state not in _EMPTY
    holders = _holders(mirror, block) if capabilities.ref_counts and ledger.ref_count[block] > 0 else ()
    return BlockFacts(
        block=block,
        title=location.name if capabilities.physical_rows else location.name.replace("Block", "Slot", 1),
        state=state if capabilities.free_rows or has_content else "not assigned",
        color=_color_name(ledger, block, state),
        rows=tuple(_fact_rows(mirror, block, block_size, holders)) if has_content else (),
        holders=holders,
        owner=None if owner == NO_OWNER or not has_content else owner,
        text_lookup=lookup_of(mirror, block) if has_content else None,
        is_state=ledger.tier[block] in STATE_TIERS,
        empty_text=""
        if has_content
        else _NO_KNOWN_BLOCK
        if not capabilities.free_rows
        else _EMPTY_LOWER_ROW
        if location.tier in LOWER_TIERS
        else _EMPTY[state],
    )


def _state_name(ledger: Ledger, block: int) -> str:
    state = BlockState(int(ledger.state[block]))
    if state is not BlockState.ACTIVE:
        return _STATES[state]
    if ledger.tier[block] in LOWER_TIERS:
        return "swapped out"
    return "shared" if ledger.ref_count[block] > 1 else _STATES[state]


def _color_name(ledger: Ledger, block: int, state: str) -> str:
    if state in _EMPTY:
        return "block_free" if state == "free" else "block_unmapped"
    if state == "unknown":
        return "muted"
    return TIER_STYLES[Tier(int(ledger.tier[block]))].color or f"block_{state}"


def _fact_rows(mirror: Mirror, block: int, block_size: int, holders: tuple[int, ...]) -> list[tuple[str, str]]:
    assert mirror.hello is not None, "it has blocks"
    ledger, capabilities, cache = mirror.ledger, mirror.capabilities, mirror.hello.cache
    held_text = _held_text(mirror, block, holders)
    rows = [("Holds", held_text)] if held_text else [("Owner", _owner_text(mirror, block, holders))]
    if not capabilities.ref_counts:
        rows.append(("Held by", UNKNOWN))
    elif (num_holders := int(ledger.ref_count[block])) > 1:
        rows.append(("Held by", f"{num_holders} requests: {_holders_text(holders, num_holders)}"))
    tier = Tier(int(ledger.tier[block]))
    if len(groups := cache.groups) > 1:
        number = min(int(ledger.group[block]), len(groups) - 1)
        block_size = cache.block_sizes[number]
        sizes = {size for size, group in zip(cache.block_sizes, groups, strict=True) if group.kind != "state"}
        of_size = f", blocks of {plural(block_size, 'token')}" if len(sizes) > 1 and tier not in STATE_TIERS else ""
        rows.append(("KV group", f"{number}: {group_name(groups[number])}{of_size}"))
    if tier in STATE_TIERS:
        if num_tokens := int(ledger.filled[block]):
            rows.append(("After", _state_tokens_text(num_tokens, block_size)))
    else:
        filled = f"{int(ledger.filled[block])} of {plural(block_size, 'token')}"
        rows.append(("Filled", filled if capabilities.filled else UNKNOWN))
    if tier not in (Tier.HBM, Tier.STATES):
        rows.append(("In", TIER_STYLES[tier].memory))
    if block in mirror.pinned:
        rows.append(("Pinned", f"by {mirror.pinned_by or 'an unknown client'}: protected from eviction"))
    rows.append(("Last used", _last_use_text(mirror, block, holders)))
    if position := eviction_position(ledger, block):
        rows.append(("Eviction order", position))
    if (share := attention_share(int(ledger.attention[block]))) is not None:
        rows.append(
            ("Attention", f"{percent(share, _share_digits(share))} of {_attention_source(mirror, block, holders)}")
        )
    if (skipped := skipped_share(int(ledger.skipped[block]))) is not None:
        rows.append(
            (
                "Skipped by attention",
                f"by {percent(skipped)} of the sparse layers and heads" if skipped else "by no layer or head",
            )
        )
    if capabilities.prefix_hits and (prefix_hits := int(ledger.prefix_hits[block])):
        rows.append(("Prefix hits", count(prefix_hits)))
    if block_hash := int(ledger.hash[block]):
        rows.append(("Hash", f"{block_hash:016x}"[:12]))
    return rows


def _state_tokens_text(num_tokens: int, limit: int) -> str:
    beyond = " or more" if num_tokens == limit == MAX_BLOCK_SIZE else ""
    return f"the first {plural(num_tokens, 'token')} of its text{beyond}"


def eviction_position(ledger: Ledger, block: int) -> str:
    """Return the eviction position of `block` within its tier, such as `no. 12 of 340 cached blocks, after 20 free
    blocks`.

    Returns "" if the block is in use or pinned, or if the engine does not report the order.
    """
    order = ledger.eviction_order
    if not order[block]:
        return ""
    is_in_tier = ledger.tier == ledger.tier[block]
    is_queued = is_in_tier & (order != 0)
    number = int(np.count_nonzero(is_queued & (order < order[block]))) + 1
    is_free = is_in_tier & (ledger.state == BlockState.FREE)
    num_queued, num_free = np.count_nonzero(is_queued), np.count_nonzero(is_free & ~is_queued)
    if (is_free & is_queued).any():  # an engine with one queue for free and cached blocks
        queue_text = f"of {plural(int(num_queued), 'block')} that may be allocated"
    else:
        queue_text = f"of {plural(int(num_queued), 'cached block')}"
        if num_free and ledger.tier[block] == Tier.HBM:  # lower tiers keep some slots free for moves
            queue_text += f", after {plural(int(num_free), 'free block')}"
    return f"next {queue_text}" if number == 1 else f"no. {count(number)} {queue_text}"


def _held_text(mirror: Mirror, block: int, holders: tuple[int, ...]) -> str:
    """Return which part of a request a slot of a lower tier stores, or "" if no request uses the slot."""
    if mirror.ledger.tier[block] not in LOWER_TIERS or not holders:
        return ""
    number = holders[0]
    if mirror.ledger.tier[block] == Tier.HOST_STATES:
        return f"the recurrent state of request #{number} (swapped out)"
    group_and_index = mirror.requests.index_in_tables(number, block)
    index = None if group_and_index is None else group_and_index[1]
    return f"block {index} of request #{number}" + (" (swapped out)" if is_swapped_out(mirror, number) else "")


def _owner_text(mirror: Mirror, block: int, holders: tuple[int, ...]) -> str:
    owner = int(mirror.ledger.owner[block])
    if not mirror.capabilities.owners:
        return UNKNOWN
    if owner == NO_OWNER:
        return "none"
    return f"request #{owner}" if holders else f"request #{owner}, which released it"


def _holders_text(holders: tuple[int, ...], num_holders: int) -> str:
    names = ", ".join(str(number) for number in holders)
    return names + (" …" if num_holders > len(holders) else "")


def _last_use_text(mirror: Mirror, block: int, holders: tuple[int, ...]) -> str:
    if not mirror.capabilities.last_used:
        return UNKNOWN
    last_used = last_used_step(mirror, block, holders)
    age = max(0, mirror.step - last_used)
    return f"step {count(last_used)}, {'now' if age == 0 else plural(age, 'step') + ' ago'}"


def _share_digits(share: float) -> int:
    return 0 if share >= 0.1 else 1 if share >= 0.01 else 2


def _attention_source(mirror: Mirror, block: int, holders: tuple[int, ...]) -> str:
    measured_step = int(mirror.ledger.attention_step[block])
    age = max(0, mirror.step - measured_step)
    holder = f"request #{holders[0]}'s" if len(holders) == 1 else "a request's"
    return f"{holder}, {'now' if age == 0 else plural(age, 'step') + ' ago'}"


def _holders(mirror: Mirror, block: int) -> tuple[int, ...]:
    ledger = mirror.ledger
    limit = min(int(ledger.ref_count[block]), MAX_HOLDERS_NAMED)
    return tuple(mirror.requests.holders(block, limit, first=int(ledger.owner[block])))
