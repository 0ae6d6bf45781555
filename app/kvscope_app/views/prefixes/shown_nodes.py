"""Which nodes of a tree are rows of the table, and in what order. numpy alone.

Owns the rules of sorting and filtering: brothers are sorted, and whoever matches is shown with all above.
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
"""Rows of a table that somebody may still scroll through; the first in the order are shown."""
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Which(StrEnum):
    """What the filter lets through."""

    ALL = "All prefixes"
    SHARED = "Shared now"
    HELD = "In use"
    IDLE = "Idle"
    HIT = "Has hits"
    LOWER = "On host or disk"
    CUT = "Beginning evicted"


@dataclass(frozen=True, slots=True)
class ShownNodes:
    """Nodes from the top; `num_matching` is of all, however many are open."""

    nodes: npt.NDArray[np.int64]
    num_matching: int
    num_left_out: int = 0


def matches(tree: PrefixTree, which: Which, wanted: Mask | None = None) -> Mask:
    """Which nodes pass, shape (nodes,); `wanted`: those that a search found."""
    lower = tree.num_in_tier[:, BLOCK_TIERS.index(Tier.HOST) :].sum(axis=1)
    passing: dict[Which, Mask] = {
        Which.ALL: np.ones(len(tree), np.bool_),
        Which.SHARED: tree.holders > 1,
        Which.HELD: tree.holders > 0,
        Which.IDLE: tree.holders == 0,
        Which.HIT: tree.hits > 0,
        Which.LOWER: lower > 0,
        Which.CUT: tree.is_cut,
    }
    return passing[which] if wanted is None else passing[which] & wanted


def show(
    tree: PrefixTree, opened: Set[int], sort_by: npt.NDArray[np.int64], descending: bool, passing: Mask
) -> ShownNodes:
    """The rows. `opened` are the keys of nodes that a person opened; `sort_by` has a value a node."""
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
    """Nodes that may be shown, brothers beside each other and sorted. Work is by opened nodes, not by rows."""

    def __init__(self, tree: PrefixTree, nodes: Ints, values: Ints, is_opened: Mask) -> None:
        self._nodes = nodes[np.lexsort((tree.key[nodes], values[nodes], tree.parent[nodes]))]
        self._parents = tree.parent[self._nodes]
        has_below = np.zeros(len(tree), np.bool_)
        has_below[self._parents[self._parents != ROOT]] = True
        self._openers = np.flatnonzero((is_opened & has_below)[self._nodes])

    def in_order(self, at_most: int) -> tuple[Ints, int]:
        """Nodes from the top, each followed by those below it, and how many brothers are left out."""
        runs: list[Ints] = []
        room, left_out = at_most, 0
        waiting = [self._below(ROOT)]
        while waiting:
            begin, end = waiting.pop()
            if not room:
                left_out += end - begin
                continue
            place = int(np.searchsorted(self._openers, begin))
            opener = int(self._openers[place]) if place < len(self._openers) else end
            until = min(opener + 1, end, begin + room)
            runs.append(self._nodes[begin:until])
            room -= until - begin
            if until < end:
                waiting.append((until, end))
            if until == opener + 1:
                waiting.append(self._below(int(self._nodes[opener])))
        return np.concatenate(runs) if runs else np.empty(0, np.int64), left_out

    def _below(self, node: int) -> tuple[int, int]:
        """Where the children of `node` are."""
        begin, end = np.searchsorted(self._parents, (node, node + 1)).tolist()
        return begin, end
