"""Texts for a block's history: what happened to the block, and its state at a given time. Imports no Qt."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvscope_app.ui.number_text import count
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import LOWER_TIERS, NO_OWNER, BlockState, Tier
from kvscope_telemetry.summaries.block_changes import ChangeKind
from kvscope_telemetry.summaries.block_moments import BlockMoment, MomentKind

KIND_COLORS: Final = {
    MomentKind.EVICTED: "flash_evicted",
    MomentKind.COPIED: "flash_copied",
    MomentKind.SAVED: "flash_saved",
    MomentKind.LOADED: "flash_loaded",
    MomentKind.ALLOCATED: "accent",
    MomentKind.REUSED: "good",
    MomentKind.SHARED: "good",
    MomentKind.LOST: "warn",
    MomentKind.RESTARTED: "warn",
    MomentKind.KNOWN: "muted",
    MomentKind.RELEASED: "muted",
    MomentKind.FREED: "muted",
}
"""Names of theme colours by kind of moment. Other kinds have the text colour."""


def moment_text(moment: BlockMoment) -> str:
    """Return what happened to the block at `moment`, for example `Allocated to request #12`."""
    holder = f"request #{count(moment.request)}" if moment.request != NO_OWNER else ""
    sharing_text = f"Shared by {count(moment.ref_count)} requests"
    if moment.kind is MomentKind.KNOWN:
        return f"Known from here: {_state_text(moment.state, moment.ref_count, moment.request, moment.filled)}"
    if moment.kind is MomentKind.SHARED:
        return f"Shared with {holder}: {sharing_text}" if holder else f"Shared: {sharing_text}"
    if moment.kind is MomentKind.RELEASED:
        return (
            "Released by one request; one other request holds it"
            if moment.ref_count == 1
            else f"Released by one request: {sharing_text}"
        )
    return {
        MomentKind.LOST: "Unknown from here: frames are missing",
        MomentKind.RESTARTED: "Engine restarted",
        MomentKind.ALLOCATED: f"Allocated to {holder}" if holder else "Allocated",
        MomentKind.COPIED: f"Copied for {holder}" if holder else "Copied",
        MomentKind.LOADED: f"Loaded from a lower tier for {holder}" if holder else "Loaded from a lower tier",
        MomentKind.SAVED: f"Saved here for {holder}" if holder else "Saved here",
        MomentKind.FILLED: f"Full: {count(moment.filled)} tokens",
        MomentKind.REUSED: f"Used again by {holder}" if holder else "Reused",
        MomentKind.IDLE: "Released, kept in prefix cache",
        MomentKind.EVICTED: "Evicted",
        MomentKind.FREED: "Freed",
        MomentKind.REWRITTEN: f"Taken over by {holder}" if holder else "Reassigned to another request",
        MomentKind.MAPPED: "Memory mapped",
        MomentKind.UNMAPPED: "Memory unmapped",
    }[moment.kind]


def row_text(row: np.void) -> str:
    if row["how"] == ChangeKind.LOST:
        return "unknown"
    return _state_text(int(row["state"]), int(row["ref_count"]), int(row["owner"]), int(row["filled"]))


def color_of(row: np.void) -> str:
    if row["how"] == ChangeKind.LOST:
        return ""
    state = int(row["state"])
    if state in (BlockState.ACTIVE, BlockState.CACHED) and row["tier"] in LOWER_TIERS:
        return TIER_STYLES[Tier(int(row["tier"]))].color
    if state == BlockState.ACTIVE and row["ref_count"] > 1:
        return "block_shared"
    return _STATE_COLORS.get(state, "muted")


_STATE_COLORS: Final[dict[int, str]] = {
    BlockState.FREE: "block_free",
    BlockState.ACTIVE: "block_active",
    BlockState.CACHED: "block_cached",
    BlockState.UNMAPPED: "block_unmapped",
}


def _state_text(state: int, ref_count: int, owner: int, filled: int) -> str:
    if state == BlockState.ACTIVE:
        owner_text = f" by request #{count(owner)}" if owner >= 0 else ""
        holders_text = f" by {count(ref_count)} requests" if ref_count > 1 else owner_text
        return f"held{holders_text}, {count(filled)} tokens"
    if state == BlockState.CACHED:
        writer_text = f", written by request #{count(owner)}" if owner >= 0 else ""
        return f"cached{writer_text}, {count(filled)} tokens"
    return {BlockState.FREE: "free", BlockState.UNMAPPED: "unmapped"}.get(BlockState(state), "unknown")
