"""Prefix tree: texts with a common beginning share a branch, and consecutive blocks without a branching point form one
node.

Owns the nodes as columns. A tree is built from the cached blocks of one moment and never changes. Views identify
expanded nodes by key, which is the same in successive trees as long as the node begins with the same block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.prefixes.cached_blocks import CachedBlocks
from kvscope_telemetry.tier_rows import BLOCK_TIERS

Ints = npt.NDArray[np.int64]
ROOT = -1
"""Parent of top-level nodes."""
_NUM_TIERS = len(BLOCK_TIERS)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Nodes of a prefix tree as columns of shape (nodes,) unless stated otherwise. A node whose first block is
    no longer cached may have no cached blocks at all.
    """

    key: npt.NDArray[np.uint64]
    """Hash of the node's first block, even if that block is no longer cached."""
    parent: Ints
    level: Ints
    is_cut: npt.NDArray[np.bool_]
    """Whether the node's first block and all blocks before it are no longer cached, while later blocks are."""
    num_blocks: Ints
    """Number of blocks of text, each counted once even if it is in several tiers."""
    num_with_all: Ints
    num_before: Ints
    """Number of blocks of text before the node; -1 if the beginning of the text is no longer cached."""
    num_in_tier: Ints
    """Number of rows in each tier, shape (nodes, 4), in the order of `BLOCK_TIERS`."""
    hits: Ints
    """Largest number of prefix hits of any block in the node, or in its descendants if the node has no cached blocks.
    """
    last_used_step: Ints
    holders: Ints
    """Largest number of block tables that contain the same block of the node, or of its descendants if the node
    has no cached blocks.
    """
    owner: Ints
    """Number of the request that wrote the node's first cached block; `NO_OWNER` if none of its blocks is cached."""
    rows: Ints
    """Ledger rows of all nodes' blocks, in token order. A block in several tiers has several rows, the highest tier
    first.
    """
    row_hash: npt.NDArray[np.uint64]
    first_row: Ints
    """Start of each node's rows in `rows`, shape (nodes + 1,)."""
    children: Ints
    first_child: Ints
    """Start of each node's children in `children`, shape (nodes + 2,); the first entry is for `ROOT`."""

    def __len__(self) -> int:
        return len(self.key)

    @property
    def num_texts(self) -> int:
        return int((np.diff(self.first_child)[1:] == 0).sum())

    def children_of(self, node: int) -> Ints:
        """Return the children of `node`, which may be `ROOT`, in no particular order."""
        return self.children[self.first_child[node + 1] : self.first_child[node + 2]]

    def rows_of(self, node: int) -> Ints:
        return self.rows[self.first_row[node] : self.first_row[node + 1]]

    def blocks_of(self, node: int, at_most: int) -> list[tuple[int, int]]:
        """Return (hash, row) of the node's first blocks, at most `at_most`, each with its row in the highest tier."""
        low = int(self.first_row[node])
        high = min(int(self.first_row[node + 1]), low + _NUM_TIERS * at_most)
        rows = zip(self.row_hash[low:high].tolist(), self.rows[low:high].tolist(), strict=True)
        highest: dict[int, int] = {}
        for block_hash, row in rows:
            highest.setdefault(block_hash, row)
        return list(highest.items())[:at_most]

    def nodes_of(self, rows: npt.NDArray[np.integer]) -> Ints:
        """Return the nodes that contain any of `rows`, each once."""
        found = np.flatnonzero(np.isin(self.rows, rows))
        return np.unique(np.searchsorted(self.first_row, found, "right") - 1)

    def node_of(self, row: int) -> int | None:
        found = self.nodes_of(np.array([row]))
        return int(found[0]) if found.size else None

    def node_with(self, key: int) -> int | None:
        found = np.flatnonzero(self.key == np.uint64(key))
        return int(found[0]) if found.size else None

    def path_to(self, node: int) -> list[int]:
        """Return the ancestors of `node` from the top, then `node`."""
        path = [node]
        while (above := int(self.parent[path[-1]])) != ROOT:
            path.append(above)
        return path[::-1]


def build(blocks: CachedBlocks) -> PrefixTree:
    """Build the tree of `blocks`. Takes some hundred ns per block. Can run on any thread; retains no state."""
    merged = merge_chains(blocks)
    chains = fold(merged.parent)
    above = merged.parent[chains.heads]
    parent = np.where(above >= 0, chains.chain[above], ROOT) if len(above) else above
    level = levels(parent)
    parent, level = np.where(level < 0, ROOT, parent), np.maximum(level, 0)
    length = np.bincount(chains.chain, minlength=len(chains.heads))
    first = np.concatenate(([0], np.cumsum(length)))
    text_order = np.empty(len(chains.chain), np.int64)
    text_order[first[chains.chain] + chains.position] = np.arange(len(chains.chain))
    entries, ends = _entries_in(merged, text_order)
    is_cut = chains.heads >= merged.num_cached
    num_blocks = length - is_cut
    children = np.argsort(parent, kind="stable")
    descendants = _Descendants(parent, level)
    before = descendants.from_above(np.where(is_cut, -1, 0), num_blocks)
    totals = _NodeTotals(blocks, entries, ends[first])
    return PrefixTree(
        key=merged.hash[chains.heads],
        parent=parent,
        level=level,
        is_cut=is_cut,
        num_blocks=num_blocks,
        num_with_all=descendants.sum(num_blocks),
        num_before=before,
        num_in_tier=totals.in_tiers(),
        hits=totals.maximum(blocks.prefix_hits, descendants),
        last_used_step=totals.maximum(blocks.last_used_step, descendants),
        holders=totals.maximum(blocks.ref_count, descendants),
        owner=totals.owners(),
        rows=blocks.row[entries],
        row_hash=blocks.hash[entries],
        first_row=ends[first],
        children=children,
        first_child=np.searchsorted(parent[children], np.arange(-1, len(parent) + 1)),
    )


def _entries_in(merged: MergedNodes, order: Ints) -> tuple[Ints, Ints]:
    """Return the entries of `CachedBlocks` that belong to the prefixes in `order`, concatenated, and the bounds
    of each prefix's entries, shape (len(order) + 1,).
    """
    num_entries = np.diff(merged.first_entry)[order]
    ends = np.concatenate(([0], np.cumsum(num_entries)))
    offset = np.repeat(merged.first_entry[:-1][order] - ends[:-1], num_entries)
    return merged.entries[np.arange(ends[-1]) + offset], ends


class _Descendants:
    def __init__(self, parent: Ints, level: Ints) -> None:
        order = np.argsort(level, kind="stable")
        bounds = np.searchsorted(level[order], np.arange(1, level.max(initial=0) + 2))
        self._levels = np.split(order, bounds)[1:-1]
        self._parent = parent

    def from_above(self, start: Ints, length: Ints) -> Ints:
        """Return, for each node, the `start` of its top-level ancestor plus the `length` of all nodes above it.

        The result is -1 for a node whose top-level ancestor has the start -1.
        """
        before = start.copy()
        for nodes in self._levels:
            above = self._parent[nodes]
            before[nodes] = np.where(before[above] < 0, -1, before[above] + length[above])
        return before

    def sum(self, values: Ints) -> Ints:
        total = values.copy()
        for nodes in reversed(self._levels):
            np.add.at(total, self._parent[nodes], total[nodes])
        return total

    def maximum(self, values: Ints) -> Ints:
        maxima = values.copy()
        for nodes in reversed(self._levels):
            np.maximum.at(maxima, self._parent[nodes], maxima[nodes])
        return maxima


class _NodeTotals:
    def __init__(self, blocks: CachedBlocks, entries: Ints, first: Ints) -> None:
        self._blocks = blocks
        self._entries = entries
        self._first = first
        self._has_entries = np.diff(first) > 0

    def maximum(self, column: npt.NDArray[np.integer], descendants: _Descendants) -> Ints:
        maxima = np.zeros(len(self._has_entries), np.int64)
        if self._entries.size:
            maxima[self._has_entries] = np.maximum.reduceat(column[self._entries], self._first[:-1][self._has_entries])
        return np.where(self._has_entries, maxima, descendants.maximum(maxima))

    def owners(self) -> Ints:
        owner = np.full(len(self._has_entries), NO_OWNER)
        owner[self._has_entries] = self._blocks.owner[self._entries[self._first[:-1][self._has_entries]]]
        return owner

    def in_tiers(self) -> Ints:
        node = np.repeat(np.arange(len(self._has_entries)), np.diff(self._first))
        tier = np.minimum(self._blocks.tier[self._entries], _NUM_TIERS - 1).astype(np.int64)
        counts = np.bincount(node * _NUM_TIERS + tier, minlength=_NUM_TIERS * len(self._has_entries))
        return counts.reshape(-1, _NUM_TIERS)


# Merging blocks by their parents, and folding runs of blocks without a branching point into chains.
#
# Vectorised: the number of Python steps grows with the logarithm of the longest chain, and no step is per block, so
# that a million blocks can be processed while a window stays responsive. Hashes are assumed to identify a text. Cycles
# of hashes, which a hostile sender can cause, are tolerated.
@dataclass(frozen=True, slots=True)
class MergedNodes:
    """Prefixes without duplicates, as columns. Cached prefixes come first, then prefixes that are no longer
    cached but have cached successors.
    """

    hash: npt.NDArray[np.uint64]
    parent: Ints
    """Index of the preceding block in these columns; -1 for the first block of a text and for blocks that are
    no longer cached.
    """
    num_cached: int
    """Number of cached prefixes, which come first in all columns. The others are no longer cached."""
    entries: Ints
    first_entry: Ints
    """Start of each prefix's range in `entries`, followed by the end of the last range. Prefixes that are not
    cached have an empty range.
    """


@dataclass(frozen=True, slots=True)
class Chains:
    """Assigns each block to a chain of consecutive blocks. A chain begins where a text begins, and after a
    block that has several successors.
    """

    heads: Ints
    chain: Ints
    position: Ints


def merge_chains(blocks: CachedBlocks) -> MergedNodes:
    """Merge cached blocks with the same hash, and find the predecessor of each prefix."""
    entries = np.argsort(blocks.hash, kind="stable")
    hashes = blocks.hash[entries]
    is_first = np.ones(len(hashes), np.bool_)
    is_first[1:] = hashes[1:] != hashes[:-1]
    first = np.flatnonzero(is_first)
    known = hashes[first]
    parent_hashes = blocks.parent[entries[first]]
    known_index = np.minimum(np.searchsorted(known, parent_hashes), max(len(known) - 1, 0))
    has_parent = parent_hashes != 0
    is_known = has_parent & (known[known_index] == parent_hashes) if len(known) else has_parent
    missing, missing_index = np.unique(parent_hashes[has_parent & ~is_known], return_inverse=True)
    parent = np.full(len(known) + len(missing), -1)
    parent[: len(known)][is_known] = known_index[is_known]
    parent[: len(known)][has_parent & ~is_known] = len(known) + missing_index
    ends = np.full(len(missing) + 1, len(entries))
    return MergedNodes(np.concatenate((known, missing)), parent, len(known), entries, np.concatenate((first, ends)))


def fold(parent: Ints) -> Chains:
    """Fold blocks without siblings into the chain of their parent."""
    size = len(parent)
    num_after = np.bincount(parent[parent >= 0], minlength=size)
    is_head = (parent < 0) | (num_after[parent] > 1)
    head, position = _climb(np.where(is_head, np.arange(size), parent), is_head)
    is_head |= ~is_head[head]  # a cycle: each of its blocks becomes a chain of its own
    head = np.where(is_head, np.arange(size), head)
    heads = np.flatnonzero(is_head)
    number = np.zeros(size, np.int64)
    number[heads] = np.arange(len(heads))
    return Chains(heads, number[head], np.where(is_head, 0, position))


def levels(parent: Ints) -> Ints:
    """Return the number of ancestors of each node, shape of `parent`; -1 for nodes in a cycle or below one."""
    is_top = parent < 0
    top, level = _climb(np.where(is_top, np.arange(len(parent)), parent), is_top)
    return np.where(is_top[top], level, -1)


def _climb(ancestors: Ints, is_end: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Follow `ancestors` from each node to an end. Returns the end of each node and the number of steps to it, both of
    the shape of `ancestors`.
    """
    position = (~is_end).astype(np.int64)
    unfinished = np.flatnonzero(~is_end[ancestors])
    for _ in range(len(ancestors).bit_length() + 1):
        if not unfinished.size:
            break
        next_nodes = ancestors[unfinished]
        position[unfinished] += position[next_nodes]
        ancestors[unfinished] = ancestors[next_nodes]
        unfinished = unfinished[~is_end[ancestors[unfinished]]]
    return ancestors, position
