"""The prefix tree: texts that begin alike share a branch, and a branch is one node until texts part.

Owns the nodes as columns. Made anew of the cached blocks of one moment, and never changed: whoever shows it keeps what
a person opened by the nodes' keys, which stay the same from one tree to the next while a node begins with one block.
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
"""The parent of nodes that nothing is before."""
_NUM_TIERS = len(BLOCK_TIERS)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Columns of shape (nodes,) where nothing else is said. A node whose beginning is gone may hold nothing itself."""

    key: npt.NDArray[np.uint64]
    """Hash of the first block, also where that is gone."""
    parent: Ints
    level: Ints
    """Nodes above."""
    is_cut: npt.NDArray[np.bool_]
    """The block that it begins with, and all before that, are gone; blocks after them are there."""
    num_blocks: Ints
    """Blocks of text, each once however many tiers have it."""
    num_with_all: Ints
    """Of this node and all below."""
    num_before: Ints
    """Blocks of text before the node, -1 where the beginning is gone."""
    num_in_tier: Ints
    """Rows in each tier, shape (nodes, 4), in the order of `BLOCK_TIERS`."""
    hits: Ints
    """The most hits of a block; of a node that holds nothing, those below."""
    last_used_step: Ints
    holders: Ints
    """Block tables that hold the most held block."""
    owner: Ints
    """Request that wrote the first block there is, `NO_OWNER` where there is none."""
    rows: Ints
    """Rows of all nodes in the order of their texts; a block in several tiers has several, the highest first."""
    row_hash: npt.NDArray[np.uint64]
    """Of each of `rows`."""
    first_row: Ints
    """Where in `rows` those of each node begin, shape (nodes + 1,)."""
    children: Ints
    """All nodes, those of one parent together."""
    first_child: Ints
    """Where in `children` those of each node begin; the first entry is of `ROOT`: shape (nodes + 2,)."""

    def __len__(self) -> int:
        return len(self.key)

    @property
    def num_texts(self) -> int:
        """Nodes that nothing goes on from."""
        return int((np.diff(self.first_child)[1:] == 0).sum())

    def children_of(self, node: int) -> Ints:
        """The nodes below `node`, or `ROOT`, in no order."""
        return self.children[self.first_child[node + 1] : self.first_child[node + 2]]

    def rows_of(self, node: int) -> Ints:
        """The rows of a node, in the order of its text."""
        return self.rows[self.first_row[node] : self.first_row[node + 1]]

    def blocks_of(self, node: int, at_most: int) -> list[tuple[int, int]]:
        """(hash, row) of its first blocks, each once, where it is highest."""
        low = int(self.first_row[node])
        high = min(int(self.first_row[node + 1]), low + _NUM_TIERS * at_most)
        rows = zip(self.row_hash[low:high].tolist(), self.rows[low:high].tolist(), strict=True)
        highest: dict[int, int] = {}
        for block_hash, row in rows:
            highest.setdefault(block_hash, row)
        return list(highest.items())[:at_most]

    def nodes_of(self, rows: npt.NDArray[np.integer]) -> Ints:
        """The nodes that any of `rows` are part of, each once."""
        found = np.flatnonzero(np.isin(self.rows, rows))
        return np.unique(np.searchsorted(self.first_row, found, "right") - 1)

    def node_of(self, row: int) -> int | None:
        """The node that a row is part of."""
        found = self.nodes_of(np.array([row]))
        return int(found[0]) if found.size else None

    def node_with(self, key: int) -> int | None:
        """The node that begins with the block of this hash."""
        found = np.flatnonzero(self.key == np.uint64(key))
        return int(found[0]) if found.size else None

    def path_to(self, node: int) -> list[int]:
        """The nodes above, from the top, and the node."""
        path = [node]
        while (above := int(self.parent[path[-1]])) != ROOT:
            path.append(above)
        return path[::-1]


def build(blocks: CachedBlocks) -> PrefixTree:
    """The tree of `blocks`. Some hundred ns a block; knows no thread, holds nothing."""
    joined = join(blocks)
    chains = fold(joined.parent)
    above = joined.parent[chains.heads]
    parent = np.where(above >= 0, chains.chain[above], ROOT) if len(above) else above
    level = levels(parent)
    parent, level = np.where(level < 0, ROOT, parent), np.maximum(level, 0)
    length = np.bincount(chains.chain, minlength=len(chains.heads))
    first = np.concatenate(([0], np.cumsum(length)))
    in_order = np.empty(len(chains.chain), np.int64)
    in_order[first[chains.chain] + chains.place] = np.arange(len(chains.chain))
    entries, ends = _entries_in(joined, in_order)
    is_cut = chains.heads >= joined.num_there
    num_blocks = length - is_cut
    children = np.argsort(parent, kind="stable")
    down = _Down(parent, level)
    before = down.from_above(np.where(is_cut, -1, 0), num_blocks)
    own = _Own(blocks, entries, ends[first])
    return PrefixTree(
        key=joined.hash[chains.heads],
        parent=parent,
        level=level,
        is_cut=is_cut,
        num_blocks=num_blocks,
        num_with_all=down.sum(num_blocks),
        num_before=before,
        num_in_tier=own.in_tiers(),
        hits=own.most(blocks.prefix_hits, down),
        last_used_step=own.most(blocks.last_used_step, down),
        holders=own.most(blocks.ref_count, down),
        owner=own.owners(),
        rows=blocks.row[entries],
        row_hash=blocks.hash[entries],
        first_row=ends[first],
        children=children,
        first_child=np.searchsorted(parent[children], np.arange(-1, len(parent) + 1)),
    )


def _entries_in(joined: MergedNodes, order: Ints) -> tuple[Ints, Ints]:
    """The entries of blocks in `order`, and where each block's begin; one more for the end."""
    num_of = np.diff(joined.first_entry)[order]
    ends = np.concatenate(([0], np.cumsum(num_of)))
    offset = np.repeat(joined.first_entry[:-1][order] - ends[:-1], num_of)
    return joined.entries[np.arange(ends[-1]) + offset], ends


class _Down:
    """Goes over a tree level by level."""

    def __init__(self, parent: Ints, level: Ints) -> None:
        order = np.argsort(level, kind="stable")
        bounds = np.searchsorted(level[order], np.arange(1, level.max(initial=0) + 2))
        self._levels = np.split(order, bounds)[1:-1]
        self._parent = parent

    def from_above(self, start: Ints, length: Ints) -> Ints:
        """What of `length` is above each; -1 below what starts with -1."""
        before = start.copy()
        for nodes in self._levels:
            above = self._parent[nodes]
            before[nodes] = np.where(before[above] < 0, -1, before[above] + length[above])
        return before

    def sum(self, values: Ints) -> Ints:
        """Of each and all below."""
        total = values.copy()
        for nodes in reversed(self._levels):
            np.add.at(total, self._parent[nodes], total[nodes])
        return total

    def most(self, values: Ints) -> Ints:
        """The largest of each and all below."""
        total = values.copy()
        for nodes in reversed(self._levels):
            np.maximum.at(total, self._parent[nodes], total[nodes])
        return total


class _Own:
    """What the entries of each node say together."""

    def __init__(self, blocks: CachedBlocks, entries: Ints, first: Ints) -> None:
        self._blocks = blocks
        self._entries = entries
        self._first = first
        self._holds = np.diff(first) > 0

    def most(self, column: npt.NDArray[np.integer], down: _Down) -> Ints:
        found = np.zeros(len(self._holds), np.int64)
        if self._entries.size:
            found[self._holds] = np.maximum.reduceat(column[self._entries], self._first[:-1][self._holds])
        return np.where(self._holds, found, down.most(found))

    def owners(self) -> Ints:
        owner = np.full(len(self._holds), NO_OWNER)
        owner[self._holds] = self._blocks.owner[self._entries[self._first[:-1][self._holds]]]
        return owner

    def in_tiers(self) -> Ints:
        node = np.repeat(np.arange(len(self._holds)), np.diff(self._first))
        tier = np.minimum(self._blocks.tier[self._entries], _NUM_TIERS - 1).astype(np.int64)
        counts = np.bincount(node * _NUM_TIERS + tier, minlength=_NUM_TIERS * len(self._holds))
        return counts.reshape(-1, _NUM_TIERS)


# Blocks joined by their parents, and runs of them with one way on joined to chains.
#
# Vectorised: a Python step a doubling of the longest chain, none a block, so that a million blocks can be joined
# beside a window. Hashes are trusted to name a text; that a hostile sender makes them go in circles is survived.
@dataclass(frozen=True, slots=True)
class MergedNodes:
    """Each prefix once, then those that are gone but have blocks after them. Indices are of these."""

    hash: npt.NDArray[np.uint64]
    parent: Ints
    """Index of the block before, -1 for the first of a text and for what is gone."""
    num_there: int
    """Entries before this one are there, the others are gone."""
    entries: Ints
    """Indices of `CachedBlocks`, those of one prefix together."""
    first_entry: Ints
    """Where in `entries` those of each prefix begin, and one more for the end; what is gone has none."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Which chain each block is of. A chain begins where a text does, or where several go on from one block."""

    heads: Ints
    """First block of each chain, shape (chains,)."""
    chain: Ints
    """Chain of each block, shape (blocks,)."""
    place: Ints
    """How many blocks of its chain are before it, shape (blocks,)."""


def join(blocks: CachedBlocks) -> MergedNodes:
    """Find the block before each."""
    entries = np.argsort(blocks.hash, kind="stable")
    hashes = blocks.hash[entries]
    is_first = np.ones(len(hashes), np.bool_)
    is_first[1:] = hashes[1:] != hashes[:-1]
    first = np.flatnonzero(is_first)
    known = hashes[first]
    wanted = blocks.parent[entries[first]]
    at = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    has_parent = wanted != 0
    is_known = has_parent & (known[at] == wanted) if len(known) else has_parent
    gone, which = np.unique(wanted[has_parent & ~is_known], return_inverse=True)
    parent = np.full(len(known) + len(gone), -1)
    parent[: len(known)][is_known] = at[is_known]
    parent[: len(known)][has_parent & ~is_known] = len(known) + which
    ends = np.full(len(gone) + 1, len(entries))
    return MergedNodes(np.concatenate((known, gone)), parent, len(known), entries, np.concatenate((first, ends)))


def fold(parent: Ints) -> Chains:
    """Join blocks that are the only ones after their parents with these."""
    size = len(parent)
    num_after = np.bincount(parent[parent >= 0], minlength=size)
    is_head = (parent < 0) | (num_after[parent] > 1)
    head, place = _climb(np.where(is_head, np.arange(size), parent), is_head)
    is_head |= ~is_head[head]  # a circle: each of its blocks stands for itself
    head = np.where(is_head, np.arange(size), head)
    heads = np.flatnonzero(is_head)
    number = np.zeros(size, np.int64)
    number[heads] = np.arange(len(heads))
    return Chains(heads, number[head], np.where(is_head, 0, place))


def levels(parent: Ints) -> Ints:
    """How many are above each, shape of `parent`; -1 for what is in a circle or below one."""
    is_top = parent < 0
    top, level = _climb(np.where(is_top, np.arange(len(parent)), parent), is_top)
    return np.where(is_top[top], level, -1)


def _climb(up: Ints, is_end: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Follow `up` from each to an end: which end, and how many steps. Each round goes twice as far as the last."""
    place = (~is_end).astype(np.int64)
    left = np.flatnonzero(~is_end[up])
    for _ in range(len(up).bit_length() + 1):
        if not left.size:
            break
        via = up[left]
        place[left] += place[via]
        up[left] = up[via]
        left = left[~is_end[up[left]]]
    return up, place
