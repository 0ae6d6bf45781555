"""Derives what happened to a block from its successive ledger rows: allocated, filled, shared, released, evicted and so
on.

Decides the meaning of each change of the ledger row. Creates no texts for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER, STATE_TIERS, BlockState
from kvscope_telemetry.summaries.block_changes import ChangeKind, Moved, Rows


class MomentKind(StrEnum):
    KNOWN = "known"
    """Beginning of the block's known history. The block's state at that time is given, but nothing changed."""
    LOST = "lost"
    """The block's state is unknown from here on."""
    RESTARTED = "restarted"
    """The engine was restarted. The block now has its state after the restart."""
    ALLOCATED = "allocated"
    """A request allocated the block for its own tokens."""
    COPIED = "copied"
    """The block became a request's private copy of a shared block that the request writes to."""
    LOADED = "loaded"
    """The block's bytes were loaded from a lower tier."""
    SAVED = "saved"
    """The contents of a block in the tier above were copied to this block."""
    FILLED = "filled"
    """The last slot of the block was written."""
    REUSED = "reused"
    """A prompt with the same prefix hit the cached block."""
    SHARED = "shared"
    """A further request began to use the block."""
    RELEASED = "released"
    """One of several requests that shared the block released it."""
    IDLE = "idle"
    """The last request released the block; it stays in the prefix cache."""
    EVICTED = "evicted"
    """The block's cached prefix was dropped, or offloaded to the tier below."""
    FREED = "freed"
    """The block was freed and contains nothing."""
    REWRITTEN = "rewritten"
    """The block passed from one request to another within a step."""
    MAPPED = "mapped"
    UNMAPPED = "unmapped"


@dataclass(frozen=True, slots=True)
class BlockMoment:
    time_ns: int
    step: int
    kind: MomentKind
    request: int = NO_OWNER
    """Number of the request that allocated, shared or wrote the block; NO_OWNER if there is none or it is unknown."""
    state: int = BlockState.FREE
    ref_count: int = 0
    filled: int = 0
    epoch: int = 0
    hash: int = 0
    """Hash of the block's contents; 0 if the block was not full."""


@dataclass(frozen=True, slots=True)
class BlockMoments:
    """Moments sorted by time, with columns of their times and kinds for drawing."""

    moments: tuple[BlockMoment, ...] = ()
    times_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    kinds: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def without_first(self, count: int) -> BlockMoments:
        return BlockMoments(self.moments[count:], self.times_ns[count:], self.kinds[count:])

    def followed_by(self, later: BlockMoments) -> BlockMoments:
        times_ns = np.concatenate((self.times_ns, later.times_ns))
        return BlockMoments(self.moments + later.moments, times_ns, np.concatenate((self.kinds, later.kinds)))


_HOLDS_NOTHING = (BlockState.FREE, BlockState.UNMAPPED)


KINDS: Final = tuple(MomentKind)
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


def block_moments_of(moments: Sequence[BlockMoment]) -> BlockMoments:
    times_ns = np.fromiter((moment.time_ns for moment in moments), np.int64, len(moments))
    kinds = np.fromiter((_CODES[moment.kind] for moment in moments), np.uint8, len(moments))
    return BlockMoments(tuple(moments), times_ns, kinds)


def moments_of(rows: Rows, block_size: int) -> list[BlockMoment]:
    """Return the moments that successive history `rows` imply. There are one or more for each row in which
    something changed or became known.
    """
    moments: list[BlockMoment] = []
    before: dict[str, Any] | None = None
    names = rows.dtype.names or ()
    for values in rows.tolist():
        row = dict(zip(names, values, strict=True))
        moments += [_moment(row, kind) for kind in _kinds(before, row, block_size)]
        before = row
    return moments


def _kinds(before: dict[str, Any] | None, row: dict[str, Any], block_size: int) -> Iterator[MomentKind]:
    if row["how"] == ChangeKind.LOST:
        yield MomentKind.LOST
    elif before is None or before["how"] == ChangeKind.LOST:
        yield MomentKind.KNOWN
    elif row["epoch"] != before["epoch"]:
        yield MomentKind.RESTARTED
    elif row["how"] == ChangeKind.KNOWN:
        if any(row[name] != before[name] for name in ("state", "ref_count", "filled", "owner", "hash")):
            yield MomentKind.KNOWN
    else:
        yield from _changes(before, row, block_size)


def _changes(before: dict[str, Any], row: dict[str, Any], block_size: int) -> Iterator[MomentKind]:
    old_state, new_state = before["state"], row["state"]
    moved = Moved(row["moved"])
    is_same = row["hash"] == before["hash"] != 0
    is_evicted = Moved.EVICTED in moved or (old_state == BlockState.CACHED and new_state != old_state and not is_same)
    if is_evicted:
        yield MomentKind.EVICTED
    if old_state == new_state == BlockState.ACTIVE:
        yield from _held_changes(before, row, moved)
    elif new_state == BlockState.ACTIVE:
        yield MomentKind.REUSED if old_state == BlockState.CACHED and is_same else _allocation_kind(moved)
    elif new_state == BlockState.CACHED and old_state != new_state:
        yield MomentKind.IDLE if old_state == BlockState.ACTIVE else _allocation_kind(moved)
    elif new_state in _HOLDS_NOTHING and old_state not in _HOLDS_NOTHING:
        if not is_evicted:
            yield MomentKind.FREED
    elif new_state != old_state:
        yield MomentKind.UNMAPPED if new_state == BlockState.UNMAPPED else MomentKind.MAPPED
    elif Moved.SAVED in moved:
        yield MomentKind.SAVED
    elif Moved.LOADED in moved:
        yield MomentKind.LOADED
    has_more = row["filled"] > before["filled"] or old_state in _HOLDS_NOTHING or is_evicted
    is_block = row["tier"] not in STATE_TIERS
    if is_block and row["filled"] == block_size and has_more and new_state == BlockState.ACTIVE:
        yield MomentKind.FILLED


def _held_changes(before: dict[str, Any], row: dict[str, Any], moved: Moved) -> Iterator[MomentKind]:
    if Moved.COPIED in moved:
        yield MomentKind.COPIED
    elif Moved.LOADED in moved:
        yield MomentKind.LOADED
    elif Moved.SAVED in moved:
        yield MomentKind.SAVED
    elif row["owner"] != before["owner"] and row["owner"] != NO_OWNER:
        yield MomentKind.REWRITTEN
    if row["ref_count"] > before["ref_count"]:
        yield MomentKind.SHARED
    elif row["ref_count"] < before["ref_count"]:
        yield MomentKind.RELEASED


def _allocation_kind(moved: Moved) -> MomentKind:
    if Moved.COPIED in moved:
        return MomentKind.COPIED
    if Moved.SAVED in moved:
        return MomentKind.SAVED
    return MomentKind.LOADED if Moved.LOADED in moved else MomentKind.ALLOCATED


def _moment(row: dict[str, Any], kind: MomentKind) -> BlockMoment:
    is_taken = kind in (
        MomentKind.REUSED,
        MomentKind.SHARED,
        MomentKind.ALLOCATED,
        MomentKind.COPIED,
        MomentKind.LOADED,
    )
    request = row["taker"] if is_taken and row["taker"] != NO_OWNER else row["owner"]
    if kind in (MomentKind.SHARED, MomentKind.REUSED) and row["taker"] == NO_OWNER:
        request = NO_OWNER  # the owner is the request that wrote the block, not the one that took it
    if kind in (MomentKind.RELEASED, MomentKind.LOST, MomentKind.EVICTED, MomentKind.IDLE, MomentKind.FREED):
        request = NO_OWNER
    return BlockMoment(
        row["time_ns"],
        row["step"],
        kind,
        request,
        row["state"],
        row["ref_count"],
        row["filled"],
        row["epoch"],
        row["hash"],
    )
