"""Blocks joined by their parents, and runs of them with one way on joined to chains.

Vectorised: a Python step a doubling of the longest chain, none a block, so that a million blocks can be joined beside a
window. Hashes are trusted to name a text; that a hostile sender makes them go in circles is survived.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.prefixes.cached_blocks import CachedBlocks

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Joined:
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


def join(blocks: CachedBlocks) -> Joined:
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
    return Joined(np.concatenate((known, gone)), parent, len(known), entries, np.concatenate((first, ends)))


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
