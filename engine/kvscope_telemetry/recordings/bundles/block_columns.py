"""The changed blocks of many frames as columns of a bundle.

Owns what a row is told by: the row before of that block, and its frame's step. Rows are those of `BlockRows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, NO_OWNER, BlockRows, BlockState
from kvscope_telemetry.recordings.bundles import hashes as told_hashes
from kvscope_telemetry.recordings.bundles.groups import Groups, cut_up, joined_as, lengths_of, with_zeros
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.hashes import FORETOLD
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, unpack
from kvscope_telemetry.recordings.bundles.keyed import Foretold, Keyed
from kvscope_telemetry.recordings.bundles.references import Known, pack_chained, told_ids, unpack_chained

_PLAIN: Final = ("state", "tier", "prefix_hits")
_FORETOLD: Final = ("filled", "owner")
_MASK: Final = (1 << 32) - 1
_PARENT_BYTES: Final = COLUMNS["parent"].itemsize
_PARTS: Final = (*DENSE, "parent", *MEASURED)
_parts_of: Final = attrgetter(*_PARTS)


def pack_blocks(
    rows: Sequence[BlockRows], steps: Ints, known: Known, takers: Ints, into: HashList, log_time_ns: int
) -> dict[str, bytes]:
    """`rows` a frame with its step; `known` are their ids; `takers` as `Changed` has them; hashes are told in `into`.
    Raises ValueError for columns that are longer or shorter than they should be."""
    ids, groups = known.ids, known.groups
    parts = dict(zip(_PARTS, zip(*map(_parts_of, rows), strict=True), strict=True))
    columns = {name: joined_as(parts[name], COLUMNS[name], groups.counts) for name in DENSE}
    columns["parent"] = _joined_parents(parts["parent"], columns["hash"], groups)
    packed = dict(zip(("ids", "new_ids"), pack_chained(known), strict=True))
    blocks, owners = Keyed(ids), Keyed(columns["owner"])
    packed |= {name: blocks.pack(columns[name]) for name in _PLAIN}
    full = int(columns["filled"].max(initial=0))
    packed[FORETOLD] = pack(np.array([full]))
    for name in _FORETOLD:
        packed[name] = blocks.pack(columns[name], _foretold(name, columns, blocks, takers, full))
    packed |= {name: blocks.pack(column) for name, column in _measured(parts, groups).items()}
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
    packed: Mapping[str, bytes],
    steps: Ints,
    groups: Groups,
    ids: Ints,
    takers: Ints,
    has_parents: Sequence[bool],
    lists: HashesOf,
    *,
    together: bool = False,
) -> list[BlockRows]:
    """The rows that `pack_blocks` was given; `has_parents`: frames that told any; `lists` have the hashes. `together`:
    those of all frames one after another."""
    blocks = Keyed(ids)
    columns = {name: blocks.unpack(packed[name]) for name in _PLAIN}
    for name in _FORETOLD:
        full = int(unpack(packed[FORETOLD], 1)[0]) if FORETOLD in packed else None
        foretold = None if full is None else _foretold(name, columns, blocks, takers, full)
        columns[name] = blocks.unpack(packed[name], foretold)
    columns |= {name: blocks.unpack(packed[name]) for name in MEASURED if name in packed}
    columns["last_used_step"] = (steps[groups.of] - blocks.unpack(packed["age"])) & _MASK
    columns["ref_count"] = blocks.unpack(packed["ref_count"])
    if "hash_list" in packed:  # in earlier versions it lies as it is
        columns["ref_count"] += _expected_references(columns["state"])
    hashes = told_hashes.unpack_hashes(packed, columns, blocks, lists)
    parents = told_hashes.unpack_parents(packed, hashes, Keyed(columns["owner"]), blocks)
    columns["hash"] = hashes.of_rows
    if together:
        return _rows(ids, columns, parents, Groups.together(groups), [any(has_parents)])
    return _rows(ids, columns, parents, groups, has_parents)


def _foretold(name: str, columns: Mapping[str, Ints], blocks: Keyed, takers: Ints, full: int) -> Foretold:
    """A block that is held gets a token a step, others are full or hold nothing and are nobody's; a fresh one is of the
    request that took it."""
    state = columns["state"]
    is_free = state == BlockState.FREE
    if name == "owner":
        is_taken = (takers >= 0) & (state == BlockState.ACTIVE) & (columns["prefix_hits"] == 0)
        return Foretold(is_free | is_taken, np.where(is_free, NO_OWNER, takers))
    is_anew = state != BlockState.ACTIVE
    is_anew[blocks.firsts] = True
    return Foretold(is_anew, np.where(is_free, 0, full), np.ones(state.size, np.int64))


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
    num_hashed = groups.sums(is_hashed)
    told = cut_up(parents[is_hashed], COLUMNS["parent"], Groups.counted(num_hashed))
    nothing = [b""] * len(told)
    cut = [cut_up(ids, "<u4", groups), *(cut_up(columns[name], COLUMNS[name], groups) for name in DENSE)]
    cut.append([each if has else b"" for each, has in zip(told, has_parents, strict=True)])
    cut += [_told_measured(columns[name], COLUMNS[name], groups) if name in columns else nothing for name in MEASURED]
    return [BlockRows(*each) for each in zip(*cut, strict=True)]


def _measured(told: Mapping[str, Sequence[bytes]], groups: Groups) -> dict[str, Ints]:
    """Of the measured columns those that are told, an entry a row. Raises ValueError for a frame that tells zeros, or
    more or fewer than it has rows."""
    found = {}
    for name in MEASURED:
        parts = told[name]
        if not any(parts):
            continue
        if any(part and not part.strip(b"\0") for part in parts):
            raise ValueError("a measured column of zeros, which is left out otherwise")
        whole = with_zeros(parts, COLUMNS[name].itemsize, groups.counts.tolist())
        found[name] = joined_as(whole, COLUMNS[name], groups.counts)
    return found


def _told_measured(column: Ints, form: np.dtype[np.generic], groups: Groups) -> list[bytes]:
    return [part if part.strip(b"\0") else b"" for part in cut_up(column, form, groups)]


def _joined_parents(parts: Sequence[bytes], hashes: Ints, groups: Groups) -> Ints:
    """An entry a row, of parts that have one for each row with a hash, or are empty."""
    lengths, is_hashed = lengths_of(parts), hashes != 0
    if np.any((lengths != 0) & (lengths != _PARENT_BYTES * groups.sums(is_hashed))):
        raise ValueError("parents that are more or fewer than the rows with a hash")
    parents = np.zeros(hashes.size, np.int64)
    parents[is_hashed & (lengths != 0)[groups.of]] = np.frombuffer(b"".join(parts), "<i8")
    return parents
