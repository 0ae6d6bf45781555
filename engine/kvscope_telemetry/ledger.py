"""The ledger: one row a block, one numpy array a column.

The engine's block pool writes rows in place; the desktop's mirror holds the same columns and applies
changed rows by fancy indexing. This file owns the columns' names, types and meaning, and the packing of
rows to little-endian bytes. It knows neither who writes the rows nor who draws them.

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
"""`owner` of a block that no request holds."""


class BlockState(IntEnum):
    """What a block is doing. Shared is not a state: it is `ref_count > 1`."""

    FREE = 0
    """Holds nothing."""
    ACTIVE = 1
    """Held by at least one request (`ref_count >= 1`)."""
    CACHED = 2
    """Held by nobody (`ref_count == 0`), full, hashed: may be reused by a later prompt, or evicted."""
    UNMAPPED = 3
    """Address space with no memory behind it (allocator `virtual`)."""
    UNKNOWN = 255
    """A state that this version has no name for; no engine sends it."""


class Tier(IntEnum):
    """Where the bytes of a block are. A ledger has the rows of its pool first, in HBM, then a row a place of each lower
    tier, then those of recurrent states."""

    HBM = 0
    HOST = 1
    DISK = 2
    STATES = 3
    """In HBM, beside the pool: one recurrent state a row."""
    HOST_STATES = 4
    """The same in host memory: states of swapped-out requests, and of prefixes."""
    UNKNOWN = 255
    """A tier that this version has no name for; no engine sends it."""


STATE_TIERS: Final = (Tier.STATES, Tier.HOST_STATES)
"""Whose rows are recurrent states, and not blocks."""
LOWER_TIERS: Final = (Tier.HOST, Tier.DISK, Tier.HOST_STATES)
"""Whose rows no request runs on."""

COLUMNS: Final[dict[str, np.dtype[np.generic]]] = {
    "state": np.dtype("u1"),  # BlockState
    "ref_count": np.dtype("<i4"),  # how many block tables hold the block
    "filled": np.dtype("<u2"),  # slots that hold a token, 0..block_size
    "owner": np.dtype("<i4"),  # number of the request that last wrote it, NO_OWNER when free
    "tier": np.dtype("u1"),  # Tier
    "last_used_step": np.dtype("<u4"),  # step of the last write, hit or release; reads: `state.last_use`
    "prefix_hits": np.dtype("<u2"),  # prefix-cache hits since it was written, saturating
    "hash": np.dtype("<u8"),  # low 64 bits of the chained block hash, 0 when not hashed
    "parent": np.dtype("<u8"),  # `hash` of the block before it in its text; 0 for the first, and when not hashed
    "group": np.dtype("u1"),  # which of `CacheInfo.groups` it holds KV of, since it was last given out
    "eviction_order": np.dtype("<u4"),  # lowest of its tier: evicted next; 0: in use, pinned or not told
    "attention": np.dtype("<u4"),  # see `attention_share`; 0 where it was never measured
    "attention_step": np.dtype("<u4"),  # the step it was measured in, 0 where it never was
    "skipped": np.dtype("<u4"),  # see `skipped_share`; 0 where it was never counted
}
MEASURED: Final = ("attention", "attention_step", "skipped")
"""Columns that only some engines fill, whenever they measure."""
OPTIONAL: Final = ("group", "eviction_order", *MEASURED)
"""Columns that have a value a row on the wire, or are empty where all are 0."""
DENSE: Final = tuple(name for name in COLUMNS if name not in ("parent", *OPTIONAL))
"""Columns that have a value a row on the wire. Parents are there for rows with a hash alone."""
LASTING: Final = (*DENSE, "parent")
"""Columns that change when something happens to a block, and not whenever somebody measures."""
_PARTS: Final = (*LASTING, *OPTIONAL)
_parts_of: Final = attrgetter(*_PARTS)
_WHOLE_ATTENTION: Final = 1_000_000_000

Column = npt.NDArray[np.generic]


class Packing(NamedTuple):
    """How numbers lie in a field of bytes: little-endian, one after another. Recordings make their columns by it."""

    dtype: np.dtype[np.generic]
    is_row: bool = False
    """One number for each row of the struct, so that all such fields have the same length."""
    is_key: bool = False
    """The row's id or number, by which recordings sort the rows. It may be left out where rows are 0, 1, 2, …"""
    is_optional: bool = False
    """The field is empty where all of its numbers are 0."""
    rows_with: str = ""
    """The field has a number only for rows where this other field is not 0."""
    is_hash: bool = False
    """Random numbers that occur in several fields and rows: recordings keep each once."""
    counts_back_from: str = ""
    """Near this number of the message, and not above it."""


def packed(packing: Packing) -> msgspec.Meta:
    """The annotation of a field of bytes that is packed so."""
    return msgspec.Meta(extra={"packing": packing})


def packing_of(annotation: object) -> Packing | None:
    """How a field with this annotation is packed; None where it says nothing of that."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra and "packing" in note.extra:
            found: Packing = note.extra["packing"]
            return found
    return None


U2, U4, U8 = (np.dtype(name) for name in ("<u2", "<u4", "<u8"))
Ids = Annotated[bytes, packed(Packing(U4))]
"""Of blocks, u4."""
Times = Annotated[bytes, packed(Packing(U8))]
"""Nanoseconds, u8."""
RowNumbers = Annotated[bytes, packed(Packing(U4, is_row=True, is_key=True))]
"""Of each row, what it is about, u4."""
RowCounts = Annotated[bytes, packed(Packing(U4, is_row=True))]
"""A number a row, u4."""
OptionalCounts = Annotated[bytes, packed(Packing(U4, is_row=True, is_optional=True))]
"""The same, or nothing where all are 0."""


def _packed_as_column(name: str, **more: Any) -> msgspec.Meta:
    """Of a field that has a column of the ledger."""
    return packed(Packing(COLUMNS[name], is_row=True, **more))


class BlockRows(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Rows of the ledger on the wire: `ids` (u32) and each column, packed little-endian, same length.

    `parent` has an entry for each row whose `hash` is not 0, in order, or is empty where all are 0: so a block that
    is being filled costs nothing for it. `group`, `eviction_order`, `attention`, `attention_step` and `skipped` are as
    `OPTIONAL` says.
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
    """Columns of `num_blocks` rows, all free at first.

    Attributes are the columns, each shape `(num_blocks,)` with the dtype in `COLUMNS`.
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
        """Rows `start` to `stop` (exclusive) as a ledger of their own: views, so changes show in both."""
        part = Ledger(0)
        part.num_blocks = stop - start
        for name in COLUMNS:
            setattr(part, name, getattr(self, name)[start:stop])
        return part

    def pack(self, ids: npt.NDArray[np.uint32]) -> BlockRows:
        """The rows `ids`, shape `(n,)`, as bytes that no longer change with the ledger."""
        columns = {name: getattr(self, name)[ids].tobytes() for name in DENSE}
        hashed = ids[self.hash[ids].nonzero()]
        parent = _packed_parents(self.parent[hashed]) if hashed.size else b""
        columns |= {name: _packed_unless_zero(getattr(self, name)[ids]) for name in OPTIONAL}
        return BlockRows(ids=ids.astype("<u4", copy=False).tobytes(), parent=parent, **columns)

    def pack_all(self) -> BlockRows:
        """Every row, in order of block id; `ids` is left empty, which means 0..num_blocks-1."""
        columns = {name: getattr(self, name).tobytes() for name in DENSE}
        columns |= {name: _packed_unless_zero(getattr(self, name)) for name in OPTIONAL}
        return BlockRows(parent=_packed_parents(self.parent[self.hash != 0]), **columns)

    def equals(self, other: Ledger) -> bool:
        """Whether every column of every row is the same."""
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS)

    def differences(self, other: Ledger) -> list[str]:
        """The names of the columns that differ, for messages and tests."""
        return [n for n in COLUMNS if not np.array_equal(getattr(self, n), getattr(other, n))]


def unpack(rows: Sequence[BlockRows]) -> dict[str, Column]:
    """Every column of checked `rows`, joined, shape (n,): parents too have an entry a row then."""
    packed_parts: Iterable[tuple[bytes, ...]] = zip(*map(_parts_of, rows), strict=True) if rows else [()] * len(_PARTS)
    parts = dict(zip(_PARTS, packed_parts, strict=True))
    columns: dict[str, Column] = {name: np.frombuffer(b"".join(parts[name]), COLUMNS[name]) for name in DENSE}
    columns["parent"] = _unpacked_parents(parts, columns["hash"])
    return columns | {name: _unpacked_optional(parts, name) for name in OPTIONAL}


def attention_units(shares: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Shares of a request's attention, 0 to 1, as the ledger's `attention` has them: 1 and so many billionths. So has
    `skipped` its shares."""
    whole = np.rint(np.clip(shares.astype(np.float64), 0.0, 1.0) * _WHOLE_ATTENTION)
    units: npt.NDArray[np.uint32] = (whole + 1).astype(np.uint32)
    return units


def attention_shares(units: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Of the ledger's `attention`, 0 to 1; 0 also where nothing was measured."""
    shares: npt.NDArray[np.float64] = (np.maximum(units, np.uint32(1)) - np.uint32(1)) / _WHOLE_ATTENTION
    return shares


def attention_share(units: int) -> float | None:
    """Of the attention of the request that held it, the most where several did, when it was measured last; None: it
    never was."""
    return (units - 1) / _WHOLE_ATTENTION if units else None


def skipped_share(units: int) -> float | None:
    """Of the layers and KV heads that choose among blocks, those that passed the block over when it was counted last;
    the least where several requests hold it. None: it never was."""
    return attention_share(units)


def pack_u4(values: Sequence[int]) -> bytes:
    """Numbers as little-endian u32."""
    return struct.pack(f"<{len(values)}I", *values)


def pack_u8(values: Sequence[int]) -> bytes:
    """Numbers as little-endian u64."""
    return struct.pack(f"<{len(values)}Q", *values)


def num_hashed(rows: BlockRows) -> int:
    """How many of the rows have a hash."""
    return int(np.count_nonzero(np.frombuffer(rows.hash, COLUMNS["hash"])))


def parent_at(rows: BlockRows, place: int) -> int:
    """`parent` of one of the rows, found without unpacking them all."""
    hashes = np.frombuffer(rows.hash, COLUMNS["hash"])
    if not rows.parent or not hashes[place]:
        return 0
    return int(np.frombuffer(rows.parent, COLUMNS["parent"])[np.count_nonzero(hashes[:place])])


def _packed_parents(parents: npt.NDArray[np.uint64]) -> bytes:
    packed = parents.tobytes()
    return packed if packed.strip(b"\0") else b""


def _packed_unless_zero(column: Column) -> bytes:
    return column.tobytes() if column.any() else b""


def _unpacked_optional(parts: Mapping[str, Sequence[bytes]], name: str) -> Column:
    """An entry a row, 0 for those of messages that do not tell it."""
    dtype, states = COLUMNS[name], parts["state"]  # a state is a byte
    if not any(parts[name]):
        return np.zeros(sum(map(len, states)), dtype)
    filled_parts = [part or bytes(dtype.itemsize * len(state)) for part, state in zip(parts[name], states, strict=True)]
    return np.frombuffer(b"".join(filled_parts), dtype)


def _unpacked_parents(parts: Mapping[str, Sequence[bytes]], hashes: Column) -> Column:
    parents = np.zeros(len(hashes), COLUMNS["parent"])
    data = b"".join(parts["parent"])
    if data:
        are_told = np.repeat(list(map(bool, parts["parent"])), list(map(len, parts["state"])))
        parents[are_told & (hashes != 0)] = np.frombuffer(data, COLUMNS["parent"])
    return parents
