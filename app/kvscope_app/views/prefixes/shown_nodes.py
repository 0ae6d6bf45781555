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

MAX_SHOWN: Final = 20_000
"""Rows of a table that somebody may still scroll through; the first in the order are shown."""
Mask = npt.NDArray[np.bool_]


class Which(StrEnum):
    """What the filter lets through."""

    ALL = "All prefixes"
    SHARED = "Shared now"
    HELD = "In use"
    IDLE = "Idle"
    HIT = "Hit before"
    LOWER = "On host or disk"
    CUT = "Beginning evicted"


@dataclass(frozen=True, slots=True)
class Shown:
    """Nodes from the top; `num_matching` is of all, however many are open."""

    nodes: npt.NDArray[np.int64]
    num_matching: int
    num_left_out: int = 0


def matches(tree: PrefixTree, which: Which, wanted: Mask | None = None) -> Mask:
    """Which nodes pass, shape (nodes,); `wanted`: those that a search found."""
    lower = tree.num_in_tier[:, Tier.HOST] + tree.num_in_tier[:, Tier.DISK]
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


def show(tree: PrefixTree, opened: Set[int], sort_by: npt.NDArray[np.int64], descending: bool, passing: Mask) -> Shown:
    """The rows. `opened` are the keys of nodes that a person opened; `sort_by` has a value a node."""
    kept = passing.copy()
    for level in range(int(tree.level.max(initial=0)), 0, -1):
        parents = tree.parent[(tree.level == level) & kept]
        kept[parents] = True
    values = -sort_by if descending else sort_by
    rows: list[int] = []
    left_out = 0
    waiting = [_sorted(tree, ROOT, values, kept)]
    while waiting:
        brothers = waiting[-1]
        if not brothers:
            waiting.pop()
            continue
        if len(rows) == MAX_SHOWN:
            left_out += sum(map(len, waiting))
            break
        node = brothers.pop()
        rows.append(node)
        if int(tree.key[node]) in opened:
            waiting.append(_sorted(tree, node, values, kept))
    return Shown(np.array(rows, np.int64), int(passing.sum()), left_out)


def _sorted(tree: PrefixTree, node: int, values: npt.NDArray[np.int64], kept: Mask) -> list[int]:
    """The children to be shown, the first one last: they are taken from the end."""
    children = tree.children_of(node)
    children = children[kept[children]]
    order = np.lexsort((tree.key[children], values[children]))
    in_order: list[int] = children[order[::-1]].tolist()
    return in_order
