"""Unpacks, validates and counts all blocks of a snapshot, which takes long for a large pool.

Runs on the reading thread, which passes the result to the GUI thread. Owns the rules by which rows are valid and
counted. Must not depend on the mirror.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Column, Ledger, Tier, unpack
from kvscope_telemetry.messages.telemetry import Snapshot

COUNTS_SHAPE: Final = (len(Tier), len(BlockState))
_LAST_STATE: Final = np.uint8(len(BlockState) - 1)
_LAST_TIER: Final = np.uint8(len(Tier) - 1)


class WholeBlocks:
    """All blocks of `snapshot`. Raises ProtocolError for invalid rows."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot: Final = snapshot
        self.columns: Final = unpack([snapshot.blocks])
        """Each ledger column, shape (num_rows,)."""
        check_rows(self.columns, max(snapshot.hello.cache.block_sizes))
        self.counts: Final = count_kinds(self.columns["tier"], self.columns["state"])
        self._ledger: Ledger | None = None

    @property
    def num_rows(self) -> int:
        return len(self.columns["state"])

    def make_ledger(self) -> None:
        """Prepare a ledger for `release_ledger`. The first access to its memory takes most of the time."""
        self._ledger = self._new_ledger()

    def release_ledger(self) -> Ledger:
        """Return a ledger with these blocks, which the caller owns."""
        ledger, self._ledger = self._ledger, None
        return self._new_ledger() if ledger is None else ledger

    def write_to(self, ledger: Ledger) -> None:
        """Copy all columns to a ledger with the same number of rows."""
        for name, column in self.columns.items():
            getattr(ledger, name)[:] = column

    def _new_ledger(self) -> Ledger:
        ledger = Ledger(self.num_rows)
        self.write_to(ledger)
        return ledger


def count_kinds(tiers: Column, states: Column) -> npt.NDArray[np.int64]:
    """Return the number of rows per tier and state, shape `COUNTS_SHAPE`. A tier or state that this version
    does not know is counted at the last index.
    """
    tier, state = np.minimum(tiers.view(np.uint8), _LAST_TIER), np.minimum(states.view(np.uint8), _LAST_STATE)
    kind = tier * np.uint8(len(BlockState)) + state
    counts: npt.NDArray[np.int64] = np.bincount(kind, minlength=len(Tier) * len(BlockState)).astype(np.int64)
    return counts.reshape(COUNTS_SHAPE)


def check_rows(columns: Mapping[str, Column], block_size: int) -> None:
    """Raise ProtocolError for rows that no pool can have."""
    ref_count = columns["ref_count"].view("<i4")
    if ref_count.min(initial=0) < 0 or columns["owner"].view("<i4").min(initial=0) < NO_OWNER:
        raise ProtocolError("a block has a negative reference count or owner")
    if columns["filled"].view("<u2").max(initial=0) > block_size:
        raise ProtocolError(f"a block has more than {block_size} slots filled")
