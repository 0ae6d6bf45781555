"""Columns of rows that have a key, each told by the row before with the same key.

Owns which row that is. The first of a key is told by the first of the key before. Knows no messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvscope_telemetry.recordings.bundles.integers import Ints, differences, order_of, pack, unpack

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Foretold:
    """What other columns say of one, a row each."""

    at: Flags
    """Rows that are told by `values`."""
    values: Ints
    more: Ints | None = None
    """How much more another row is than the row before of its key, where it has one."""


class Keyed:
    """Rows with `keys`, in their order."""

    def __init__(self, keys: Ints) -> None:
        self._order = order_of(keys)
        in_order = keys[self._order]
        is_first = np.ones(keys.size, np.bool_)
        is_first[1:] = in_order[1:] != in_order[:-1]
        self._begins = np.flatnonzero(is_first)
        self._lengths = np.diff(self._begins, append=keys.size)
        self.firsts = np.sort(self._order[self._begins])
        """Rows that are the first of their key."""

    def pack(self, values: Ints, foretold: Foretold | None = None) -> bytes:
        """What changed, or is not as foretold."""
        changes, firsts = self.changes(values), self.firsts
        if foretold is not None:
            if foretold.more is not None:
                changes -= foretold.more
            np.subtract(values, foretold.values, out=changes, where=foretold.at)
            firsts = firsts[~foretold.at[firsts]]
        changes[firsts] = differences(values[firsts])
        return pack(changes)

    def unpack(self, data: bytes, foretold: Foretold | None = None) -> Ints:
        """The values that `pack` was given."""
        changes, firsts = unpack(data, self._order.size), self.firsts
        if foretold is None:
            changes[firsts] = np.cumsum(changes[firsts])
            return self.summed(changes)
        anew = np.where(foretold.at, foretold.values + changes, 0)
        firsts = firsts[~foretold.at[firsts]]
        summed = np.cumsum(changes[firsts])
        if foretold.more is not None:
            changes += foretold.more
        changes[firsts] = summed
        changes[foretold.at] = 0
        values = self.summed(changes)
        values += self.held(anew - values, foretold.at)
        return values

    def changes(self, values: Ints) -> Ints:
        """Each value less that of the row before with the same key; the first of a key as it is."""
        in_order = values[self._order]
        changed = differences(in_order)
        changed[self._begins] = in_order[self._begins]
        return self._back(changed)

    def summed(self, changes: Ints) -> Ints:
        """The values of which `changes` are told."""
        in_order = changes[self._order]
        totals = np.cumsum(in_order)
        before = totals[self._begins] - in_order[self._begins]
        return self._back(totals - np.repeat(before, self._lengths))

    def before(self, values: Ints) -> Ints:
        """The value of the row before with the same key; 0 for the first of a key."""
        in_order = values[self._order]
        moved = np.concatenate((np.zeros(1, values.dtype), in_order[:-1]))[: values.size]
        moved[self._begins] = 0
        return self._back(moved)

    def held(self, values: Ints, is_told: Flags) -> Ints:
        """For each row the value of the newest that is told, with the same key and not after it; 0 where none is."""
        rows = np.where(is_told[self._order], np.arange(values.size), -1)
        newest = np.maximum.accumulate(rows) if rows.size else rows
        is_there = newest >= np.repeat(self._begins, self._lengths)
        return self._back(np.where(is_there, values[self._order][newest], 0))

    def _back(self, in_order: Ints) -> Ints:
        values = np.empty_like(in_order)
        values[self._order] = in_order
        return values
