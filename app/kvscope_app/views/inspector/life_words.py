"""What happened to a block, in words, and how it was at a moment. Knows no Qt."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvscope_app.look.number_text import count
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.summaries.block_life import How
from kvscope_telemetry.summaries.life_moments import Kind, Moment

KIND_COLORS: Final = {
    Kind.EVICTED: "flash_evicted",
    Kind.COPIED: "flash_copied",
    Kind.SAVED: "flash_saved",
    Kind.LOADED: "flash_loaded",
    Kind.BORN: "accent",
    Kind.REUSED: "good",
    Kind.SHARED: "good",
    Kind.LOST: "warn",
    Kind.RESTARTED: "warn",
    Kind.KNOWN: "muted",
    Kind.LEFT: "muted",
    Kind.FREED: "muted",
}
"""The theme's names; all others are told as text is."""


def moment_text(moment: Moment) -> str:
    """`taken by request #12`."""
    who = f"request #{count(moment.request)}" if moment.request != NO_OWNER else ""
    held = f"Shared by {count(moment.ref_count)} requests"
    if moment.kind is Kind.KNOWN:
        return f"Known from here: {_how(moment.state, moment.ref_count, moment.request, moment.filled)}"
    if moment.kind is Kind.SHARED:
        return f"Shared with {who}: {held}" if who else f"Shared: {held}"
    if moment.kind is Kind.LEFT:
        return "Released by one; one request holds it" if moment.ref_count == 1 else f"One let go: {held}"
    return {
        Kind.LOST: "Unknown from here: frames are missing",
        Kind.RESTARTED: "Engine restarted",
        Kind.BORN: f"Taken by {who}" if who else "Allocated",
        Kind.COPIED: f"Copied on write for {who}" if who else "Copied on write",
        Kind.LOADED: f"Loaded from a lower tier for {who}" if who else "Loaded from a lower tier",
        Kind.SAVED: f"Saved here for {who}" if who else "Saved here",
        Kind.FILLED: f"Full: {count(moment.filled)} tokens",
        Kind.REUSED: f"Used again by {who}" if who else "Reused",
        Kind.IDLE: "Released, kept in prefix cache",
        Kind.EVICTED: "Evicted",
        Kind.FREED: "Freed",
        Kind.REWRITTEN: f"Taken over by {who}" if who else "Reassigned to another request",
        Kind.MAPPED: "Memory mapped",
        Kind.UNMAPPED: "Memory unmapped",
    }[moment.kind]


def row_text(row: np.void) -> str:
    """How the block was while a row of its life stood."""
    if row["how"] == How.LOST:
        return "unknown"
    return _how(int(row["state"]), int(row["ref_count"]), int(row["owner"]), int(row["filled"]))


def color_of(row: np.void) -> str:
    """The page map's colour for it, as the theme calls it; "" where it is not known."""
    if row["how"] == How.LOST:
        return ""
    state = int(row["state"])
    if state in (BlockState.ACTIVE, BlockState.CACHED) and row["tier"] in _TIER_COLORS:
        return _TIER_COLORS[int(row["tier"])]
    if state == BlockState.ACTIVE and row["ref_count"] > 1:
        return "block_shared"
    return _STATE_COLORS.get(state, "muted")


_STATE_COLORS: Final[dict[int, str]] = {
    BlockState.FREE: "block_free",
    BlockState.ACTIVE: "block_active",
    BlockState.CACHED: "block_cached",
    BlockState.UNMAPPED: "block_unmapped",
}
_TIER_COLORS: Final[dict[int, str]] = {Tier.HOST: "block_host", Tier.DISK: "block_disk"}


def _how(state: int, ref_count: int, owner: int, filled: int) -> str:
    if state == BlockState.ACTIVE:
        who = f" by {count(ref_count)} requests" if ref_count > 1 else f" by request #{count(owner)}" * (owner >= 0)
        return f"held{who}, {count(filled)} tokens"
    if state == BlockState.CACHED:
        whose = f", written by request #{count(owner)}" if owner >= 0 else ""
        return f"cached{whose}, {count(filled)} tokens"
    return {BlockState.FREE: "free", BlockState.UNMAPPED: "unmapped"}.get(BlockState(state), "unknown")
