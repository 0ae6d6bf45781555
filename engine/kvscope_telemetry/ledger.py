"""Ledger of all KV cache blocks: one row per block, one numpy array per column.

The engine's block pool writes rows in place. The desktop's mirror has the same columns and applies changed rows by
fancy indexing. Owns the names, types and meaning of the columns, and the packing of rows into little-endian bytes.
Independent of writers and views.

See docs/internals/decisions/0001-blocks-are-rows-of-columns.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

NO_OWNER: Final = -1
"""`owner` of a block that was not written by a known request, such as a free one."""


class BlockState(IntEnum):
    """State of a block. Shared blocks are `ACTIVE`, with `ref_count > 1`."""

    FREE = 0
    ACTIVE = 1
    """In use by at least one request (`ref_count >= 1`)."""
    CACHED = 2
    """In use by no request (`ref_count == 0`), full and hashed: a later prompt may reuse it, or it may be evicted."""
    UNMAPPED = 3
    """A ledger row whose address range has no physical memory (allocator `virtual`)."""
    UNKNOWN = 255
    """State that this version does not have. Never sent by an engine."""


class Tier(IntEnum):
    """Location of a block's bytes.

    The rows of a ledger are ordered by tier: first the blocks of the pool (HBM), then one row per slot of each lower
    tier, then the recurrent states.
    """

    HBM = 0
    HOST = 1
    DISK = 2
    STATES = 3
    """Recurrent states in HBM, outside the pool, with one state per row."""
    HOST_STATES = 4
    """Recurrent states in host memory, of swapped-out requests and of prefixes."""
    UNKNOWN = 255
    """Tier that this version does not have. Never sent by an engine."""


STATE_TIERS: Final = (Tier.STATES, Tier.HOST_STATES)
"""Tiers with recurrent states as rows instead of blocks."""
LOWER_TIERS: Final = (Tier.HOST, Tier.DISK, Tier.HOST_STATES)
"""Tiers below the pool. Their contents must be loaded into the pool before a request can use them."""

COLUMNS: Final[dict[str, np.dtype[np.generic]]] = {
    "state": np.dtype("u1"),  # BlockState
    "ref_count": np.dtype("<i4"),  # how many block tables hold the block
    "filled": np.dtype("<u2"),  # slots that hold a token, 0..block_size
    "owner": np.dtype("<i4"),  # number of the request that last wrote it, NO_OWNER when free
    "tier": np.dtype("u1"),  # Tier
    "last_used_step": np.dtype("<u4"),  # step of the last write, hit or release; reads: `mirror.last_use`
    "prefix_hits": np.dtype("<u2"),  # prefix-cache hits since it was written, saturating
    "hash": np.dtype("<u8"),  # low 64 bits of the chained block hash, 0 when not hashed
    "parent": np.dtype("<u8"),  # `hash` of the block before it in its text; 0 for the first, and when not hashed
    "group": np.dtype("u1"),  # index in `CacheInfo.groups` of the KV it holds, set at allocation
    "eviction_order": np.dtype("<u4"),  # lowest of its tier: evicted next; 0: in use, pinned or not reported
    "attention": np.dtype("<u4"),  # see `attention_share`; 0 where it was never measured
    "attention_step": np.dtype("<u4"),  # the step it was measured in, 0 where it never was
    "skipped": np.dtype("<u4"),  # see `skipped_share`; 0 where it was never counted
}
MEASURED: Final = ("attention", "attention_step", "skipped")
"""Columns with measurements of attention. Engines that measure attention fill them, in the steps in which they
measure.
"""
OPTIONAL: Final = ("group", "eviction_order", *MEASURED)
"""Columns that are omitted on the wire if all values are 0. Otherwise they have one value per row."""
DENSE: Final = tuple(name for name in COLUMNS if name not in ("parent", *OPTIONAL))
"""Columns that always have one value per row on the wire. `parent` has values only for rows with a hash."""
LASTING: Final = (*DENSE, "parent")
"""Columns that change only when something happens to the block, in contrast to `OPTIONAL` columns such as those
with measurements of attention.
"""
_PARTS: Final = (*LASTING, *OPTIONAL)
_parts_of: Final = attrgetter(*_PARTS)
_WHOLE_ATTENTION: Final = 1_000_000_000

Column = npt.NDArray[np.generic]


class Packing(NamedTuple):
    """Packing of numbers in a bytes field: consecutive and little-endian. Recordings derive their columns from it."""

    dtype: np.dtype[np.generic]
    is_row: bool = False
    """Whether the field has one number per row of the struct. All such fields of a struct have the same length."""
    is_key: bool = False
    """Whether the numbers are the rows' ids, by which recordings sort the rows. An empty field stands for ids 0, 1, 2,
    ...
    """
    is_optional: bool = False
    """Whether the field is empty if all of its numbers are 0."""
    rows_with: str = ""
    """Name of another field of the struct; empty if all rows have a number in this field. Otherwise, this field
    has numbers only for the rows in which the other field is not 0.
    """
    is_hash: bool = False
    """Whether the numbers are hashes, which are random and repeat across fields and rows. Recordings store each
    distinct hash once.
    """
    counts_back_from: str = ""
    """Name of a field of the message that contains a single number. The values of this field are at most
    slightly smaller than that number, so recordings store the differences from it.
    """


def packed(packing: Packing) -> msgspec.Meta:
    return msgspec.Meta(extra={"packing": packing})


def packing_of(annotation: object) -> Packing | None:
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra and "packing" in note.extra:
            packing: Packing = note.extra["packing"]
            return packing
    return None


U2, U4, U8 = (np.dtype(name) for name in ("<u2", "<u4", "<u8"))
Ids = Annotated[bytes, packed(Packing(U4))]
"""Packed block ids, unsigned 32-bit."""
Times = Annotated[bytes, packed(Packing(U8))]
"""Packed times in nanoseconds, unsigned 64-bit."""
RowNumbers = Annotated[bytes, packed(Packing(U4, is_row=True, is_key=True))]
"""Packed ids of the rows to which the other columns of a message belong (`Packing.is_key`), unsigned 32-bit."""
RowCounts = Annotated[bytes, packed(Packing(U4, is_row=True))]
"""One packed unsigned 32-bit number per row, such as a token count, in a message whose columns have one entry per row.
"""
OptionalCounts = Annotated[bytes, packed(Packing(U4, is_row=True, is_optional=True))]
"""The same as `RowCounts`, but empty if all numbers are 0."""


def _packed_as_column(name: str, **options: Any) -> msgspec.Meta:
    return packed(Packing(COLUMNS[name], is_row=True, **options))


class BlockRows(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Rows of the ledger on the wire: `ids` (u32) and each column, packed little-endian, all with one number per row.

    `parent` has an entry for each row whose `hash` is not 0, in order, or is empty if all are 0, so that a partially
    filled block needs no bytes for it. Columns in `OPTIONAL` are empty if all values are 0.
    """

    ids: RowNumbers = b""
    state: Annotated[bytes, _packed_as_column("state")] = b""
    ref_count: Annotated[bytes, _packed_as_column("ref_count")] = b""
    filled: Annotated[bytes, _packed_as_column("filled")] = b""
    owner: Annotated[bytes, _packed_as_column("owner")] = b""
    tier: Annotated[bytes, _packed_as_column("tier")] = b""
    last_used_step: Annotated[bytes, _packed_as_column("last_used_step", counts_back_from="step")] = b""
    prefix_hits: Annotated[bytes, _packed_as_column("prefix_hits")] = b""
    hash: Annotated[bytes, _packed_as_column("hash", is_hash=True)] = b""
    parent: Annotated[bytes, _packed_as_column("parent", is_hash=True, is_optional=True, rows_with="hash")] = b""
    group: Annotated[bytes, _packed_as_column("group", is_optional=True)] = b""
    eviction_order: Annotated[bytes, _packed_as_column("eviction_order", is_optional=True)] = b""
    attention: Annotated[bytes, _packed_as_column("attention", is_optional=True)] = b""
    attention_step: Annotated[bytes, _packed_as_column("attention_step", is_optional=True)] = b""
    skipped: Annotated[bytes, _packed_as_column("skipped", is_optional=True)] = b""


class Ledger:
    """Columns of `num_blocks` rows, all free initially.

    Attributes are the columns, each of shape `(num_blocks,)` with the dtype in `COLUMNS`.
    """

    __slots__ = (*COLUMNS, "num_blocks")

    state: npt.NDArray[np.uint8]
    ref_count: npt.NDArray[np.int32]
    filled: npt.NDArray[np.uint16]
    owner: npt.NDArray[np.int32]
    tier: npt.NDArray[np.uint8]
    last_used_step: npt.NDArray[np.uint32]
    prefix_hits: npt.NDArray[np.uint16]
    hash: npt.NDArray[np.uint64]
    parent: npt.NDArray[np.uint64]
    group: npt.NDArray[np.uint8]
    eviction_order: npt.NDArray[np.uint32]
    attention: npt.NDArray[np.uint32]
    attention_step: npt.NDArray[np.uint32]
    skipped: npt.NDArray[np.uint32]

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        for name, dtype in COLUMNS.items():
            setattr(self, name, np.zeros(num_blocks, dtype))
        self.owner.fill(NO_OWNER)

    def part(self, start: int, stop: int) -> Ledger:
        """Return rows `start` to `stop` (exclusive) as a ledger of views, so that changes are visible in both."""
        part = Ledger(0)
        part.num_blocks = stop - start
        for name in COLUMNS:
            setattr(part, name, getattr(self, name)[start:stop])
        return part

    def pack(self, ids: npt.NDArray[np.uint32]) -> BlockRows:
        """Return a packed copy of the rows `ids`, shape `(n,)`."""
        columns = {name: getattr(self, name)[ids].tobytes() for name in DENSE}
        hashed = ids[self.hash[ids].nonzero()]
        parent = _packed_parents(self.parent[hashed]) if hashed.size else b""
        columns |= {name: _packed_unless_zero(getattr(self, name)[ids]) for name in OPTIONAL}
        return BlockRows(ids=ids.astype("<u4", copy=False).tobytes(), parent=parent, **columns)

    def pack_all(self) -> BlockRows:
        """Return a packed copy of all rows in order of block id. `ids` is empty, which means 0 to `num_blocks` - 1."""
        columns = {name: getattr(self, name).tobytes() for name in DENSE}
        columns |= {name: _packed_unless_zero(getattr(self, name)) for name in OPTIONAL}
        return BlockRows(parent=_packed_parents(self.parent[self.hash != 0]), **columns)

    def equals(self, other: Ledger) -> bool:
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS)

    def differences(self, other: Ledger) -> list[str]:
        return [n for n in COLUMNS if not np.array_equal(getattr(self, n), getattr(other, n))]


def unpack(rows: Sequence[BlockRows]) -> dict[str, Column]:
    """Return each column of `rows` concatenated, shape (n,), with one entry per row also for `parent`.

    `rows` must have been validated.
    """
    packed_parts: Iterable[tuple[bytes, ...]] = zip(*map(_parts_of, rows), strict=True) if rows else [()] * len(_PARTS)
    parts = dict(zip(_PARTS, packed_parts, strict=True))
    columns: dict[str, Column] = {name: np.frombuffer(b"".join(parts[name]), COLUMNS[name]) for name in DENSE}
    columns["parent"] = _unpacked_parents(parts, columns["hash"])
    return columns | {name: _unpacked_optional(parts, name) for name in OPTIONAL}


def attention_units(shares: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Encode shares of a request's attention, 0 to 1, for the column `attention`: 1 plus the share in billionths.

    `skipped` has the same encoding.
    """
    whole = np.rint(np.clip(shares.astype(np.float64), 0.0, 1.0) * _WHOLE_ATTENTION)
    units: npt.NDArray[np.uint32] = (whole + 1).astype(np.uint32)
    return units


def attention_shares(units: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Decode the column `attention` to shares, 0 to 1. Blocks without a measurement also get 0."""
    shares: npt.NDArray[np.float64] = (np.maximum(units, np.uint32(1)) - np.uint32(1)) / _WHOLE_ATTENTION
    return shares


def attention_share(units: int) -> float | None:
    """Decode one value of `attention`: the block's share of its request's attention at the last measurement, or None if
    the block was never measured.

    If several requests used the block, the value is the largest of their shares.
    """
    return (units - 1) / _WHOLE_ATTENTION if units else None


def skipped_share(units: int) -> float | None:
    """Decode one value of `skipped`: the share of layers and KV heads with sparse attention that skipped the block, or
    None if this was never counted for the block.

    If several requests used the block, the value is the smallest of their shares.
    """
    return attention_share(units)


def pack_u4(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def pack_u8(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def num_hashed(rows: BlockRows) -> int:
    return int(np.count_nonzero(np.frombuffer(rows.hash, COLUMNS["hash"])))


def parent_at(rows: BlockRows, index: int) -> int:
    """Return `parent` of the row at `index`, without unpacking all rows; 0 without a parent."""
    hashes = np.frombuffer(rows.hash, COLUMNS["hash"])
    if not rows.parent or not hashes[index]:
        return 0
    return int(np.frombuffer(rows.parent, COLUMNS["parent"])[np.count_nonzero(hashes[:index])])


def _packed_parents(parents: npt.NDArray[np.uint64]) -> bytes:
    packed = parents.tobytes()
    return packed if packed.strip(b"\0") else b""


def _packed_unless_zero(column: Column) -> bytes:
    return column.tobytes() if column.any() else b""


def _unpacked_optional(parts: Mapping[str, Sequence[bytes]], name: str) -> Column:
    """Return the optional column `name` with one value per row; 0 for rows of messages that omit the column."""
    dtype, states = COLUMNS[name], parts["state"]  # one byte per row
    if not any(parts[name]):
        return np.zeros(sum(map(len, states)), dtype)
    filled_parts = [part or bytes(dtype.itemsize * len(state)) for part, state in zip(parts[name], states, strict=True)]
    return np.frombuffer(b"".join(filled_parts), dtype)


def _unpacked_parents(parts: Mapping[str, Sequence[bytes]], hashes: Column) -> Column:
    parents = np.zeros(len(hashes), COLUMNS["parent"])
    data = b"".join(parts["parent"])
    if data:
        is_present = np.repeat(list(map(bool, parts["parent"])), list(map(len, parts["state"])))
        parents[is_present & (hashes != 0)] = np.frombuffer(data, COLUMNS["parent"])
    return parents
