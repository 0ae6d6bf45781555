"""The changed blocks of many frames as columns of a bundle.

Owns what a row is told by: the row before of that block, and its frame's step. Rows are those of `BlockRows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, BlockRows, BlockState
from kvscope_telemetry.recordings.bundles import hashes as told_hashes
from kvscope_telemetry.recordings.bundles.groups import Groups, cut_up, joined_as, lengths_of
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.integers import Ints, starts_of
from kvscope_telemetry.recordings.bundles.keyed import Keyed
from kvscope_telemetry.recordings.bundles.references import Known, pack_chained, told_ids, unpack_chained

_PLAIN: Final = ("state", "filled", "owner", "tier", "prefix_hits")
_MASK: Final = (1 << 32) - 1
_PARENT_BYTES: Final = COLUMNS["parent"].itemsize


def pack_blocks(
    rows: Sequence[BlockRows], steps: Ints, known: Known, into: HashList, log_time_ns: int
) -> dict[str, bytes]:
    """`rows` a frame with its step; `known` are their ids; hashes are told in `into`. Raises ValueError for columns
    that are longer or shorter than they should be."""
    ids, groups = known.ids, known.groups
    columns = {name: joined_as([getattr(each, name) for each in rows], COLUMNS[name], groups.counts) for name in DENSE}
    columns["parent"] = _joined_parents([each.parent for each in rows], columns["hash"], groups)
    packed = dict(zip(("ids", "new_ids"), pack_chained(known), strict=True))
    blocks, owners = Keyed(ids), Keyed(columns["owner"])
    packed |= {name: blocks.pack(columns[name]) for name in _PLAIN}
    packed |= {name: blocks.pack(column) for name, column in _measured(rows, groups).items()}
    packed["age"] = blocks.pack(steps[groups.of] - columns["last_used_step"])
    packed["ref_count"] = blocks.pack(columns["ref_count"] - _expected_references(columns["state"]))
    told, hashes = told_hashes.pack_hashes(columns, blocks, into, log_time_ns)
    return packed | told | told_hashes.pack_parents(columns["parent"], hashes, into, owners, blocks)


def unpack_ids(packed: Mapping[str, bytes], groups: Groups) -> Ints:
    """Which blocks the rows are of."""
    return unpack_chained((packed["ids"], packed["new_ids"]), groups)


def speaks_of(packed: Mapping[str, bytes], groups: Groups, block: int) -> bool:
    """Whether one of the rows is of `block`; the others are not unpacked for it."""
    return bool(np.any(told_ids((packed["ids"], packed["new_ids"]), groups.num_rows) == block))


def unpack_blocks(
    packed: Mapping[str, bytes], steps: Ints, groups: Groups, ids: Ints, has_parents: Sequence[bool], lists: HashesOf
) -> list[BlockRows]:
    """The rows that `pack_blocks` was given; `has_parents`: frames that told any; `lists` have the hashes."""
    blocks = Keyed(ids)
    columns = {name: blocks.unpack(packed[name]) for name in _PLAIN}
    columns |= {name: blocks.unpack(packed[name]) for name in MEASURED if name in packed}
    columns["last_used_step"] = (steps[groups.of] - blocks.unpack(packed["age"])) & _MASK
    columns["ref_count"] = blocks.unpack(packed["ref_count"])
    if "hash_list" in packed:  # in earlier versions it lies as it is
        columns["ref_count"] += _expected_references(columns["state"])
    hashes = told_hashes.unpack_hashes(packed, columns, blocks, lists)
    parents = told_hashes.unpack_parents(packed, hashes, Keyed(columns["owner"]), blocks)
    columns["hash"] = hashes.of_rows
    return _rows(ids, columns, parents, groups, has_parents)


def _expected_references(state: Ints) -> Ints:
    """One holder of what is held."""
    expected: Ints = (state == BlockState.ACTIVE).astype(np.int64)
    return expected


def _rows(
    ids: Ints, columns: Mapping[str, Ints], parents: Ints, groups: Groups, has_parents: Sequence[bool]
) -> list[BlockRows]:
    is_hashed = columns["hash"] != 0
    if np.any(parents[~is_hashed]):
        raise ProtocolError("a bundle with the parent of a block that has no hash")
    num_hashed = _num_hashed(is_hashed, groups)
    told = cut_up(parents[is_hashed], COLUMNS["parent"], Groups.counted(num_hashed))
    nothing = [b""] * len(told)
    cut = [cut_up(ids, "<u4", groups), *(cut_up(columns[name], COLUMNS[name], groups) for name in DENSE)]
    cut.append([each if has else b"" for each, has in zip(told, has_parents, strict=True)])
    cut += [_told_measured(columns[name], COLUMNS[name], groups) if name in columns else nothing for name in MEASURED]
    return [BlockRows(*each) for each in zip(*cut, strict=True)]


def _measured(rows: Sequence[BlockRows], groups: Groups) -> dict[str, Ints]:
    """Of the measured columns those that are told, an entry a row. Raises ValueError for a frame that tells zeros, or
    more or fewer than it has rows."""
    found = {}
    for name in MEASURED:
        parts = [getattr(each, name) for each in rows]
        if not any(parts):
            continue
        if any(part and not part.strip(b"\0") for part in parts):
            raise ValueError("a measured column of zeros, which is left out otherwise")
        size = COLUMNS[name].itemsize
        whole = [part or bytes(size * count) for part, count in zip(parts, groups.counts.tolist(), strict=True)]
        found[name] = joined_as(whole, COLUMNS[name], groups.counts)
    return found


def _told_measured(column: Ints, form: np.dtype[np.generic], groups: Groups) -> list[bytes]:
    return [part if part.strip(b"\0") else b"" for part in cut_up(column, form, groups)]


def _joined_parents(parts: Sequence[bytes], hashes: Ints, groups: Groups) -> Ints:
    """An entry a row, of parts that have one for each row with a hash, or are empty."""
    lengths, is_hashed = lengths_of(parts), hashes != 0
    if np.any((lengths != 0) & (lengths != _PARENT_BYTES * _num_hashed(is_hashed, groups))):
        raise ValueError("parents that are more or fewer than the rows with a hash")
    parents = np.zeros(hashes.size, np.int64)
    parents[is_hashed & (lengths != 0)[groups.of]] = np.frombuffer(b"".join(parts), "<i8")
    return parents


def _num_hashed(is_hashed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], groups: Groups) -> Ints:
    """How many rows of each group have a hash."""
    counts: Ints = np.diff(starts_of(is_hashed.astype(np.int64))[groups.starts])
    return counts
