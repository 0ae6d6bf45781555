"""Ids told by where they stand in a list that is known: what a frame names is mostly what the one before named.

A row's code is how far its id stands behind that of the row before, 1 for the next; 0 is an id that is told in full.
Rows are in groups, a group a frame, and each group has its own list. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.groups import Groups
from kvscope_telemetry.recordings.bundles.integers import (
    Ints,
    pack,
    pack_deltas,
    starts_of,
    unpack,
    unpack_deltas,
    unpack_deltas_each,
    unpack_each,
)


class Known:
    """Ids that others are told by, in groups."""

    def __init__(self, ids: Ints, groups: Groups) -> None:
        self.ids, self.groups = ids, groups
        there = (groups.of << 32) | ids
        self._order = np.argsort(there, kind="stable")
        self._in_order = there[self._order]

    def find(self, ids: Ints, groups: Ints) -> Ints:
        """Where each of `ids` stands in its group of `groups`; -1 where it does not."""
        if not self._order.size:
            return np.full(ids.size, -1)
        wanted = (groups << 32) | ids
        at = np.minimum(np.searchsorted(self._in_order, wanted), self._order.size - 1)
        places = self._order[at] - self.groups.starts[groups]
        found: Ints = np.where(self._in_order[at] == wanted, places, -1)
        return found


def pack_ids(ids: Ints, groups: Groups, known: Known) -> tuple[bytes, bytes]:
    """Codes, and the ids that are told in full; each group of `ids` by the same group of `known`."""
    return pack_found(ids, groups, known)[0]


def pack_found(ids: Ints, groups: Groups, known: Known) -> tuple[tuple[bytes, bytes], Ints]:
    """The same, and the row of `known` that each is told by; -1 for one that is told in full."""
    if not ids.size:
        return (pack(ids), pack(ids)), ids
    places = known.find(ids, groups.of)
    codes = _codes(places, groups)
    rows = np.where(codes == 0, -1, places + known.groups.starts[groups.of])
    return (pack(codes), pack_deltas(ids[codes == 0])), rows


def unpack_ids(data: tuple[bytes, bytes], groups: Groups, known: Ints, known_groups: Groups) -> Ints:
    """The ids that `pack_ids` was given."""
    return unpack_found(data, groups, known, known_groups)[0]


def unpack_found(data: tuple[bytes, bytes], groups: Groups, known: Ints, known_groups: Groups) -> tuple[Ints, Ints]:
    """What `pack_found` was given, and the rows."""
    if not groups.num_rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return found_among([data], [groups.num_rows], groups, known, known_groups)


def found_among(
    parts: Sequence[tuple[bytes, bytes]], counts: Sequence[int], groups: Groups, known: Ints, known_groups: Groups
) -> tuple[Ints, Ints]:
    """What several times `pack_found` was given, so many ids each, one after another, and the rows."""
    codes = unpack_each([told for told, _ in parts], counts)
    is_told, sources = _sources(codes, groups, known_groups.starts[:-1], known_groups.counts)
    ids = np.zeros(groups.num_rows, np.int64)
    ids[~is_told] = known[sources[~is_told]]
    in_full = Groups.counted(np.array(counts)).sums(is_told).tolist()
    ids[is_told] = unpack_deltas_each([told for _, told in parts], in_full)
    return ids, np.where(is_told, -1, sources)


def pack_chained(known: Known) -> tuple[bytes, bytes]:
    """The same of its own ids, each group by the one before it."""
    codes = _codes(known.find(known.ids, known.groups.of - 1), known.groups)
    return pack(codes), pack_deltas(known.ids[codes == 0])


def unpack_chained(data: tuple[bytes, bytes], groups: Groups) -> Ints:
    """The ids that `pack_chained` was given."""
    none = np.zeros(1, np.int64)
    starts, counts = np.concatenate((none, groups.starts[:-2])), np.concatenate((none, groups.counts[:-1]))
    codes = unpack(data[0], groups.num_rows)
    is_told, sources = _sources(codes, groups, starts[: len(groups.counts)], counts[: len(groups.counts)])
    sources[is_told] = np.flatnonzero(is_told)
    while not np.array_equal(sources, nearer := sources[sources]):  # each is of the group before: it ends
        sources = nearer
    ids = np.zeros(groups.num_rows, np.int64)
    ids[is_told] = unpack_deltas(data[1], int(is_told.sum()))
    return ids[sources]


def told_ids(data: tuple[bytes, bytes], num_rows: int) -> Ints:
    """Those that are told in full. Of `pack_chained` these are all ids, each once or more; of `pack_ids` those that are
    not among what is known."""
    return unpack_deltas(data[1], num_rows - int(np.count_nonzero(unpack(data[0], num_rows))))


def _codes(places: Ints, groups: Groups) -> Ints:
    """Of rows that stand at `places` of what is known, or nowhere."""
    is_found, rows = places >= 0, np.arange(places.size)
    newest = np.maximum.accumulate(np.where(is_found, rows, -1))
    before = np.concatenate((np.full(1, -1), newest[:-1]))[: places.size]
    last = np.where(before >= groups.starts[groups.of], places[before], -1)
    return np.where(is_found, places - last, 0)


def _sources(
    codes: Ints, groups: Groups, starts: Ints, counts: Ints
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.bool_]], Ints]:
    """Which rows are told in full, and where the others stand in what is known."""
    is_told = codes == 0
    walked = starts_of(codes)
    places = walked[1:] - walked[groups.starts[groups.of]] - 1
    if np.any(((places < 0) | (places >= counts[groups.of])) & ~is_told):
        raise ProtocolError("a bundle with an id that stands nowhere")
    return is_told, places + starts[groups.of]
