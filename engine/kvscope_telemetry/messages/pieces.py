"""The wire form of a whole state in pieces: the columns of the ledger as they lie there, none of them copied.

A snapshot of a million blocks has 34 MB. To copy it is one call that holds all other threads of the process up for tens
of milliseconds; pieces can be gone through a slice at a time. Knows no files.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.ledger import DENSE, MEASURED, BlockRows, Column, Ledger
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.messages.wire import encode

Pieces = Sequence[bytes | memoryview]
"""To be read one after the other."""
_PLACE_BYTES: Final = 16
_MAP_OF_FEW: Final = 0x80  # msgpack's: up to 15 entries
_BYTES: Final = ((0xC4, ">BB"), (0xC5, ">BH"), (0xC6, ">BI"))
"""msgpack's three heads of bytes, the shortest first: a tag and their number in 8, 16 and 32 bits."""
_KEYS: Final = {field.name: msgspec.msgpack.encode(field.encode_name) for field in msgspec.structs.fields(BlockRows)}


def snapshot_pieces(snapshot: Snapshot, ledger: Ledger, *, has_parents: bool = True) -> Pieces:
    """`snapshot`, whose own blocks are not looked at, with every row of `ledger`, which must not change before; without
    the parents of its blocks where `has_parents` is false."""
    rows = BlockRows(ids=secrets.token_bytes(_PLACE_BYTES))
    head, tail = encode(msgspec.structs.replace(snapshot, blocks=rows)).split(msgspec.msgpack.encode(rows))
    return [head, *_rows(ledger, has_parents=has_parents), tail]


def _rows(ledger: Ledger, *, has_parents: bool) -> list[bytes | memoryview]:
    columns: dict[str, Column] = {name: getattr(ledger, name) for name in DENSE if ledger.num_blocks}
    parents = ledger.parent[ledger.hash != 0] if has_parents else ledger.parent[:0]
    if parents.any():
        columns["parent"] = parents
    columns |= {name: column for name in MEASURED if (column := getattr(ledger, name)).any()}
    pieces: list[bytes | memoryview] = [bytes([_MAP_OF_FEW + len(columns)])]
    for name, column in columns.items():
        pieces += (_KEYS[name] + head_of_bytes(column.nbytes), _bytes_of(column))
    return pieces


def head_of_bytes(num_bytes: int) -> bytes:
    """What so many bytes begin with in msgpack."""
    tag, layout = _BYTES[(num_bytes > 0xFF) + (num_bytes > 0xFFFF)]
    return struct.pack(layout, tag, num_bytes)


def _bytes_of(column: Column) -> memoryview:
    return np.ascontiguousarray(column).view(np.uint8).data
