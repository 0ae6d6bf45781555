"""Leaps as they lie in a recording (`listed_leaps`), opened each by itself and then read together as one.

Who seeks goes over dozens of them: joined, numpy is asked once for a column of all. Knows no files; what is read is
checked for what this needs, the leap where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import RequestRows
from kvscope_telemetry.recordings.bundles.groups import Groups, accepted, lengths_of, with_zeros
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf
from kvscope_telemetry.recordings.bundles.hashes import listed_at
from kvscope_telemetry.recordings.bundles.integers import Ints, readable, unpack_each, unpack_tables
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import (
    BY_ROW,
    CHANGED,
    NEW_REQUEST,
    NEW_REQUESTS,
    NUM_COLUMNS,
    ListedLeap,
    bare_of,
    before_each,
    lying_leap,
)
from kvscope_telemetry.recordings.bundles.references import found_among
from kvscope_telemetry.recordings.bundles.request_columns import IF_ANY, REQUEST_COLUMNS

_MASK: Final = (1 << 32) - 1
_ZERO: Final = b"\0"
_NONE: Final[Ints] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class OpenedLeap:
    """One of which it is known what it follows; its rows are not looked at yet."""

    bare: Leap
    """Without its blocks, and of requests only what few tell."""
    lies: ListedLeap
    listed: Ints
    """Hashes of its list, as far as it refers to them."""

    @property
    def num_rows(self) -> int:
        """Blocks that changed."""
        return self.lies.num_rows


def opened_leap(data: bytes, lists: HashesOf) -> OpenedLeap | None:
    """The leap that `pack_listed_leap` was given, to be joined; None for what is none. Raises ProtocolError."""
    with readable("a leap"):
        lies = lying_leap(data)
        return None if lies is None else _opened(lies, lists)


def listed_leap(data: bytes, lists: HashesOf) -> Leap | None:
    """The leap that `pack_listed_leap` was given, not checked; None for what is none. Raises ProtocolError."""
    opened = opened_leap(data, lists)
    return None if opened is None else joined_leap([opened])


def joined_leap(leaps: Sequence[OpenedLeap]) -> Leap:
    """Leaps of one file of which each follows the one before as one, not checked: what changed in several is in it as
    often, the last time as it stands. Raises ProtocolError."""
    with readable("a leap"):
        return _joined(leaps)


def _opened(lies: ListedLeap, lists: HashesOf) -> OpenedLeap:
    listed = lists(lies.list, lies.num_listed) if lies.num_listed else _NONE
    return OpenedLeap(bare_of(lies), lies, listed)


def _joined(leaps: Sequence[OpenedLeap]) -> Leap:
    packed, counts = [leap.lies.columns for leap in leaps], [leap.num_rows for leap in leaps]
    bare, groups = leaps[-1].bare, Groups.counted(np.array(counts))
    table = unpack_tables([each["rows"] for each in packed], NUM_COLUMNS, counts)
    ids, order, places = table[:3]
    back = _rows_of(order, groups)
    rows = dict(zip(BY_ROW, table[3:, back], strict=True))
    steps = np.array([leap.bare.step for leap in leaps])
    rows["last_used_step"] = (steps[groups.of] - rows["last_used_step"]) & _MASK
    listed = _Lists.of(leaps, groups)
    rows["hash"] = _hashes(packed, groups, places, listed)[back]
    parent = b""
    if any("parents" in each for each in packed):
        parents = _parents(packed, groups, places, listed)[back]
        parent = parents[rows["hash"] != 0].tobytes()
    told = {name: rows[name].astype(COLUMNS[name]).tobytes() for name in DENSE}
    for name in MEASURED:
        told[name] = _if_any([getattr(leap.bare.blocks, name) for leap in leaps], COLUMNS[name].itemsize, counts)
    told["ids"] = ids.astype("<u4").tobytes()
    times_ns = np.array([leap.bare.time_ns for leap in leaps])
    return replace(
        bare,
        since_seq=leaps[0].bare.since_seq,
        blocks=replace(bare.blocks, parent=parent, **told),
        new_requests=NEW_REQUESTS.unpack_each(packed, times_ns, NEW_REQUEST),
        requests=_requests(leaps, packed, ids[order + groups.starts[groups.of]], groups),
    )


def _rows_of(order: Ints, groups: Groups) -> Ints:
    """Where each row lies that `order` tells the place of."""
    back = np.full(order.size, -1)
    is_inside = (order >= 0) & (order < groups.counts[groups.of])
    back[(order + groups.starts[groups.of])[is_inside]] = np.flatnonzero(is_inside)
    if np.any(back < 0):
        raise ProtocolError("a leap whose rows are in no order")
    return back


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of hashes that leaps refer to, one after another; for each row the one of its leap."""

    hashes: Ints
    begins: Ints
    sizes: Ints
    """As far as the leap refers to it."""

    @classmethod
    def of(cls, leaps: Sequence[OpenedLeap], groups: Groups) -> _Lists:
        """Of the rows of `leaps`, which are `groups`."""
        longest: dict[int, Ints] = {}
        for leap in leaps:
            if leap.listed.size >= longest.get(leap.lies.list, _NONE).size:
                longest[leap.lies.list] = leap.listed
        ends = np.cumsum([each.size for each in longest.values()])
        begins = dict(zip(longest, [0, *ends.tolist()], strict=False))
        told = [begins[leap.lies.list] for leap in leaps], [leap.listed.size for leap in leaps]
        return cls(np.concatenate(list(longest.values())), *(np.array(each)[groups.of] for each in told))

    def at(self, places: Ints, rows: Ints) -> Ints:
        """The hashes at `places` of the lists of these rows. Raises ProtocolError where there are none."""
        if np.any((places < 0) | (places >= self.sizes[rows])):
            raise ProtocolError("a leap with hashes that are told nowhere")
        return listed_at(self.hashes, places + self.begins[rows])


def _hashes(packed: Sequence[Mapping[str, bytes]], groups: Groups, places: Ints, lists: _Lists) -> Ints:
    """Of every row as it lies."""
    hashes, is_told = np.zeros(places.size, np.int64), places == lists.sizes
    rows = np.flatnonzero((places != -1) & ~is_told)
    hashes[rows] = lists.at(places[rows], rows)
    hashes[is_told] = _in_full(packed, "hashes", groups.sums(is_told))
    return hashes


def _parents(packed: Sequence[Mapping[str, bytes]], groups: Groups, places: Ints, lists: _Lists) -> Ints:
    """Of every row as it lies; 0 where none is told."""
    rows = np.flatnonzero((places >= 0) & np.array(["parents" in each for each in packed])[groups.of])
    leaps = groups.of[rows]
    back = unpack_each(
        [each.get("parents", _ZERO) for each in packed], np.bincount(leaps, minlength=len(packed)).tolist()
    )
    at, is_told = before_each(places[rows], leaps) - back + (back > 0), back == 0
    parents = np.zeros(places.size, np.int64)
    parents[rows[~is_told]] = lists.at(at[~is_told], rows[~is_told])
    counts = np.bincount(leaps[is_told], minlength=len(packed))
    parents[rows[is_told]] = _in_full(packed, "parents_in_full", counts)
    return parents


def _in_full(packed: Sequence[Mapping[str, bytes]], name: str, counts: Ints) -> Ints:
    """Hashes that lie in full, so many each."""
    parts = [each[name] if count else each.get(name, b"") for each, count in zip(packed, counts.tolist(), strict=True)]
    if not np.array_equal(lengths_of(parts), 8 * counts):
        raise ProtocolError("a leap with hashes that are told nowhere")
    return np.frombuffer(b"".join(parts), "<i8").astype(np.int64)


def _requests(
    leaps: Sequence[OpenedLeap], packed: Sequence[Mapping[str, bytes]], ids: Ints, groups: Groups
) -> RequestRows:
    """`ids`: blocks that changed, in the order in which they are referred to."""
    sizes = unpack_each(
        [each[CHANGED + name] for each in packed for name in ("rows", "table_rows")], [1] * 2 * len(leaps)
    )
    counts, num_blocks = accepted(sizes[::2]).counts.tolist(), accepted(sizes[1::2])
    columns = unpack_tables([each[CHANGED + "columns"] for each in packed], len(REQUEST_COLUMNS), counts)
    told = {
        name: column.astype(form).tobytes()
        for (name, form), column in zip(REQUEST_COLUMNS.items(), columns, strict=True)
    }
    for name in IF_ANY:
        told[name] = _if_any([getattr(leap.bare.requests, name) for leap in leaps], 4, counts)
    tables = [(each[CHANGED + "table"], each[CHANGED + "new_table"]) for each in packed]
    if num_blocks.num_rows:
        found = found_among(tables, num_blocks.counts.tolist(), num_blocks, ids, groups)[0]
        told["table_blocks"] = found.astype("<u4").tobytes()
    return RequestRows(**told)


def _if_any(parts: Sequence[bytes], num_bytes: int, counts: Sequence[int]) -> bytes:
    """Columns of so many bytes a row; where one is empty beside others that are not, its numbers are 0."""
    return b"".join(with_zeros(parts, num_bytes, counts)) if any(parts) else b""
