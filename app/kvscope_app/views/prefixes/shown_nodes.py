"""Selects and orders the nodes of a tree that become rows of the table. Imports no Qt.

Siblings are sorted, and nodes that match the filter are shown together with all their ancestors.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.prefixes.tree import ROOT, PrefixTree
from kvscope_telemetry.tier_rows import BLOCK_TIERS

MAX_SHOWN: Final = 20_000
"""Maximum number of table rows. More could not be scrolled through, so only the first ones are shown."""
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class PrefixFilter(StrEnum):
    ALL = "All prefixes"
    SHARED = "Shared now"
    HELD = "In use"
    IDLE = "Idle"
    HIT = "Has hits"
    LOWER = "On host or disk"
    CUT = "Beginning evicted"


@dataclass(frozen=True, slots=True)
class ShownNodes:
    """Nodes in row order. `num_matching` counts all nodes that match the filter, including collapsed ones."""

    nodes: npt.NDArray[np.int64]
    num_matching: int
    num_left_out: int = 0


def matches(tree: PrefixTree, node_filter: PrefixFilter, is_match: Mask | None = None) -> Mask:
    """Return which nodes pass `node_filter`, shape (nodes,).

    `is_match` says which nodes a search matches; None if no search is active.
    """
    lower = tree.num_in_tier[:, BLOCK_TIERS.index(Tier.HOST) :].sum(axis=1)
    passes: dict[PrefixFilter, Mask] = {
        PrefixFilter.ALL: np.ones(len(tree), np.bool_),
        PrefixFilter.SHARED: tree.holders > 1,
        PrefixFilter.HELD: tree.holders > 0,
        PrefixFilter.IDLE: tree.holders == 0,
        PrefixFilter.HIT: tree.hits > 0,
        PrefixFilter.LOWER: lower > 0,
        PrefixFilter.CUT: tree.is_cut,
    }
    return passes[node_filter] if is_match is None else passes[node_filter] & is_match


def visible_nodes(
    tree: PrefixTree, expanded: Set[int], sort_by: npt.NDArray[np.int64], descending: bool, passes_filter: Mask
) -> ShownNodes:
    """Return the rows of the table.

    Args:
        tree: Tree of the nodes.
        expanded: Keys of the expanded nodes.
        sort_by: Value by which siblings are sorted, shape (nodes,).
        descending: Whether the highest value is first.
        passes_filter: Whether a node matches the filter, shape (nodes,).
    """
    is_shown = passes_filter.copy()
    for level in range(int(tree.level.max(initial=0)), 0, -1):
        parents = tree.parent[(tree.level == level) & is_shown]
        is_shown[parents] = True
    is_expanded = np.isin(tree.key, np.fromiter(expanded, np.uint64, len(expanded)))
    is_parent_expanded = np.where(tree.parent == ROOT, True, is_expanded[tree.parent])
    families = _Families(
        tree, np.flatnonzero(is_shown & is_parent_expanded), -sort_by if descending else sort_by, is_expanded
    )
    nodes, num_left_out = families.in_order(MAX_SHOWN)
    return ShownNodes(nodes, int(passes_filter.sum()), num_left_out)


class _Families:
    """Visible tree nodes, with siblings contiguous and sorted."""

    def __init__(self, tree: PrefixTree, nodes: Ints, values: Ints, is_expanded: Mask) -> None:
        self._nodes = nodes[np.lexsort((tree.key[nodes], values[nodes], tree.parent[nodes]))]
        self._parents = tree.parent[self._nodes]
        has_children = np.zeros(len(tree), np.bool_)
        has_children[self._parents[self._parents != ROOT]] = True
        self._expanded = np.flatnonzero((is_expanded & has_children)[self._nodes])

    def in_order(self, at_most: int) -> tuple[Ints, int]:
        """Return at most `at_most` nodes in depth-first order from the top, and the number of siblings left out.

        Takes time proportional to the number of expanded nodes, not of rows.
        """
        runs: list[Ints] = []
        num_left, num_left_out = at_most, 0
        pending = [self._children_range(ROOT)]
        while pending:
            start, end = pending.pop()
            if not num_left:
                num_left_out += end - start
                continue
            index = int(np.searchsorted(self._expanded, start))
            expanded = int(self._expanded[index]) if index < len(self._expanded) else end
            stop = min(expanded + 1, end, start + num_left)
            runs.append(self._nodes[start:stop])
            num_left -= stop - start
            if stop < end:
                pending.append((stop, end))
            if stop == expanded + 1:
                pending.append(self._children_range(int(self._nodes[expanded])))
        return np.concatenate(runs) if runs else np.empty(0, np.int64), num_left_out

    def _children_range(self, node: int) -> tuple[int, int]:
        start, end = np.searchsorted(self._parents, (node, node + 1)).tolist()
        return start, end
