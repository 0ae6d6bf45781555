"""Input of a prefix tree: cached blocks, each with its hash and the hash of the block before it.

Blocks are read from a ledger. A source that reports hashes but no physical rows fills the same columns and numbers the
rows itself, so that the tree does not depend on the source of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import COLUMNS, Ledger
from kvscope_telemetry.messages.telemetry import CacheInfo

_TREE_COLUMNS: Final = ("hash", "parent", "tier", "ref_count", "prefix_hits", "last_used_step", "owner")
_COPIED_COLUMNS: Final = (*_TREE_COLUMNS, "group")
_WHOLE_TEXT_KINDS: Final = ("full", "latent", "indexed", "prefixes", "")
"""Kinds of KV groups that retain the KV of all tokens of a text, or may do so, in order of preference."""


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Cached blocks as columns of shape (n,), with one entry per ledger row that holds a prefix. A prefix may be in
    several rows, one per tier.
    """

    hash: npt.NDArray[np.uint64]
    """Hash of the block, never 0."""
    parent: npt.NDArray[np.uint64]
    """Hash of the block before this one in its text; 0 for the first block of a text."""
    row: npt.NDArray[np.int64]
    tier: npt.NDArray[np.uint8]
    ref_count: npt.NDArray[np.int32]
    prefix_hits: npt.NDArray[np.uint16]
    last_used_step: npt.NDArray[np.uint32]
    owner: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.hash)


class LedgerCopy:
    """Copy of a ledger's columns, to build a tree on another thread. Buffers are reused by the next copy."""

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[np.generic]] = {}

    def fits(self, ledger: Ledger) -> bool:
        return len(self._columns.get("hash", ())) == ledger.num_blocks

    def reserve(self, num_blocks: int) -> None:
        """Allocate buffers for `num_blocks` rows and touch their memory. Any thread may call it before `copy_from`.

        The first use of the memory takes ten times as long as a copy.
        """
        columns = {name: np.empty(num_blocks, COLUMNS[name]) for name in _COPIED_COLUMNS}
        for column in columns.values():
            column.fill(0)
        self._columns = columns

    def copy_from(self, ledger: Ledger) -> None:
        if not self.fits(ledger):
            self.reserve(ledger.num_blocks)
        for name, column in self._columns.items():
            np.copyto(column, getattr(ledger, name))

    def blocks(self, group: int | None = None) -> CachedBlocks:
        """Return the copied rows that hold a prefix, only of KV group `group` if given. Takes time linear in the
        ledger."""
        has_prefix = self._columns["hash"] != 0
        if group is not None:
            has_prefix &= self._columns["group"] == group
        rows = np.flatnonzero(has_prefix)
        columns = {name: self._columns[name][rows] for name in _TREE_COLUMNS}
        return CachedBlocks(row=rows, **columns)  # type: ignore[arg-type]


def group_of_tree(cache: CacheInfo) -> int | None:
    """Return the KV group whose prefixes are shown: the first that keeps the whole text. None if the model has only one
    KV group.

    All KV groups store the same text under the same hashes. A tree of all groups would therefore count the text several
    times. It would also show text as cached that only some of the groups still have, which no prompt can reuse.
    """
    if len(cache.groups) < 2:
        return None
    kinds = [group.kind for group in cache.groups]
    return next((kinds.index(kind) for kind in _WHOLE_TEXT_KINDS if kind in kinds), 0)


def blocks_of(ledger: Ledger) -> CachedBlocks:
    ledger_copy = LedgerCopy()
    ledger_copy.copy_from(ledger)
    return ledger_copy.blocks()
