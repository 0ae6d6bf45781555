"""Selects and orders the nodes of a tree that are rows of the table. Uses numpy only.

Owns the rules of sorting and filtering: siblings are sorted, and matching nodes are shown with all their ancestors.
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
"""Maximum number of rows, which can still be scrolled through; the first ones in the order are shown."""
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
    """Nodes from the top. `num_matching` counts all matching nodes, including collapsed ones."""

    nodes: npt.NDArray[np.int64]
    num_matching: int
    num_left_out: int = 0


def matches(tree: PrefixTree, which: PrefixFilter, wanted: Mask | None = None) -> Mask:
    """Return a mask of the nodes that pass, shape (nodes,). `wanted`: mask of the nodes that a search matches."""
    lower = tree.num_in_tier[:, BLOCK_TIERS.index(Tier.HOST) :].sum(axis=1)
    passing: dict[PrefixFilter, Mask] = {
        PrefixFilter.ALL: np.ones(len(tree), np.bool_),
        PrefixFilter.SHARED: tree.holders > 1,
        PrefixFilter.HELD: tree.holders > 0,
        PrefixFilter.IDLE: tree.holders == 0,
        PrefixFilter.HIT: tree.hits > 0,
        PrefixFilter.LOWER: lower > 0,
        PrefixFilter.CUT: tree.is_cut,
    }
    return passing[which] if wanted is None else passing[which] & wanted


def visible_nodes(
    tree: PrefixTree, opened: Set[int], sort_by: npt.NDArray[np.int64], descending: bool, passing: Mask
) -> ShownNodes:
    """Return the rows. `opened`: keys of the expanded nodes; `sort_by`: one value per node."""
    kept = passing.copy()
    for level in range(int(tree.level.max(initial=0)), 0, -1):
        parents = tree.parent[(tree.level == level) & kept]
        kept[parents] = True
    is_opened = np.isin(tree.key, np.fromiter(opened, np.uint64, len(opened)))
    is_below_opened = np.where(tree.parent == ROOT, True, is_opened[tree.parent])
    families = _Families(tree, np.flatnonzero(kept & is_below_opened), -sort_by if descending else sort_by, is_opened)
    nodes, num_left_out = families.in_order(MAX_SHOWN)
    return ShownNodes(nodes, int(passing.sum()), num_left_out)


class _Families:
    """Nodes that may be shown, with siblings contiguous and sorted. The cost depends on expanded nodes, not on rows."""

    def __init__(self, tree: PrefixTree, nodes: Ints, values: Ints, is_opened: Mask) -> None:
        self._nodes = nodes[np.lexsort((tree.key[nodes], values[nodes], tree.parent[nodes]))]
        self._parents = tree.parent[self._nodes]
        has_below = np.zeros(len(tree), np.bool_)
        has_below[self._parents[self._parents != ROOT]] = True
        self._openers = np.flatnonzero((is_opened & has_below)[self._nodes])

    def in_order(self, at_most: int) -> tuple[Ints, int]:
        """Return at most `at_most` nodes from the top in depth-first order, and how many siblings are left out."""
        runs: list[Ints] = []
        room, left_out = at_most, 0
        waiting = [self._below(ROOT)]
        while waiting:
            begin, end = waiting.pop()
            if not room:
                left_out += end - begin
                continue
            index = int(np.searchsorted(self._openers, begin))
            opener = int(self._openers[index]) if index < len(self._openers) else end
            until = min(opener + 1, end, begin + room)
            runs.append(self._nodes[begin:until])
            room -= until - begin
            if until < end:
                waiting.append((until, end))
            if until == opener + 1:
                waiting.append(self._below(int(self._nodes[opener])))
        return np.concatenate(runs) if runs else np.empty(0, np.int64), left_out

    def _below(self, node: int) -> tuple[int, int]:
        begin, end = np.searchsorted(self._parents, (node, node + 1)).tolist()
        return begin, end
