"""What a prefix tree is made of: blocks that can be found by a hash, each with the hash of the one before it.

A ledger is one place to take them from. A source that tells of hashes and not of physical rows fills the same columns
with rows that it numbers itself, so nothing after this file knows where blocks come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, Ledger
from kvscope_telemetry.messages.telemetry import CacheInfo

_TAKEN: Final = ("hash", "parent", "tier", "ref_count", "prefix_hits", "last_used_step", "owner")
_READ: Final = (*_TAKEN, "group")
_FURTHEST: Final = ("full", "latent", "indexed", "prefixes", "")
"""Kinds of KV groups that keep all of a text, and those that may."""


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Columns of shape (n,), an entry a row that holds a prefix; one prefix may be in several rows, a tier each."""

    hash: npt.NDArray[np.uint64]
    """Never 0."""
    parent: npt.NDArray[np.uint64]
    """Hash of the block before it in its text, 0 for the first."""
    row: npt.NDArray[np.int64]
    """Which row it is: of a ledger, or as its source numbers them."""
    tier: npt.NDArray[np.uint8]
    ref_count: npt.NDArray[np.int32]
    prefix_hits: npt.NDArray[np.uint16]
    last_used_step: npt.NDArray[np.uint32]
    owner: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.hash)


class LedgerCopy:
    """A ledger's columns as they were, for another thread.

    Taking them is all that the ledger's own thread does: memory is copied, and that which was there before is used
    again.
    """

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[np.generic]] = {}

    def fits(self, ledger: Ledger) -> bool:
        """Whether there is room already."""
        return len(self._columns.get("hash", ())) == ledger.num_blocks

    def make_room(self, num_blocks: int) -> None:
        """Touch memory for so many rows: the first time takes ten times as long as a copy, and any thread may do it."""
        columns = {name: np.empty(num_blocks, COLUMNS[name]) for name in _READ}
        for column in columns.values():
            column.fill(0)
        self._columns = columns

    def take(self, ledger: Ledger) -> None:
        """Copy what a tree is made of."""
        if not self.fits(ledger):
            self.make_room(ledger.num_blocks)
        for name, column in self._columns.items():
            np.copyto(column, getattr(ledger, name))

    def blocks(self, group: int | None = None) -> CachedBlocks:
        """The rows among them that hold a prefix, in one KV group where it is given. Costs the length of the ledger."""
        holds = self._columns["hash"] != 0
        if group is not None:
            holds &= self._columns["group"] == group
        rows = np.flatnonzero(holds)
        taken = {name: self._columns[name][rows] for name in _TAKEN}
        return CachedBlocks(row=rows, **taken)  # type: ignore[arg-type]


def group_of_tree(cache: CacheInfo) -> int | None:
    """Whose prefixes are shown of several KV groups: those of the first that keeps all of a text. None where there is
    one group.

    A text is in each group, under the same hashes: a tree of all would count it several times, and show as cached what
    no prompt finds, which is what only some groups have.
    """
    if len(cache.groups) < 2:
        return None
    kinds = [group.kind for group in cache.groups]
    return next((kinds.index(kind) for kind in _FURTHEST if kind in kinds), 0)


def blocks_of(ledger: Ledger) -> CachedBlocks:
    """What of `ledger` holds a prefix now."""
    copied = LedgerCopy()
    copied.take(ledger)
    return copied.blocks()
