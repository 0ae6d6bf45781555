"""Leaps with their largest columns told by what stands beside: neighbours change together.

Such a leap lies in a recording without ids, owners, steps of last use and parents; beside it ids and owners lie as
differences from row to row, last use as how many steps ago, and each parent as the place of that hash
(`placed_parents`). Knows no files; what is read is checked for what this needs, the leap where it goes.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS
from kvscope_telemetry.messages.leap import Leap, encode_leap
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.placed_parents import hashed, pack_parents, unpack_parents

_MASK: Final = (1 << 32) - 1
_IDS: Final = np.dtype("<u4")


class PackedLeap(msgspec.Struct, frozen=True, tag=True):
    """As it lies in a recording."""

    message: bytes
    """A leap without these columns."""
    ids: bytes
    owner: bytes
    age: bytes
    places: bytes
    """Of parents; empty where none are told."""
    told: bytes
    """u8 a parent that is told in full."""


_BEGIN: Final = msgspec.msgpack.encode(PackedLeap(b"", b"", b"", b"", b"", b""))[:17]
"""Map of seven, and the tag: no other message begins so."""
_PACKED: Final = msgspec.msgpack.Decoder(PackedLeap)
_LEAPS: Final = msgspec.msgpack.Decoder(Leap)


def pack_leap(leap: Leap) -> bytes:
    """`leap` as it is written."""
    blocks = leap.blocks
    if not blocks.ids:
        return encode_leap(leap)
    ids, owners = _column(blocks.ids, _IDS), _column(blocks.owner, COLUMNS["owner"])
    ages = leap.step - _column(blocks.last_used_step, COLUMNS["last_used_step"])
    places, told = pack_parents(hashed(blocks.hash), blocks.parent)
    bare = encode_leap(replace(leap, blocks=replace(blocks, ids=b"", owner=b"", last_used_step=b"", parent=b"")))
    packed = PackedLeap(bare, pack_deltas(ids), pack_deltas(owners), pack(ages), places, told)
    return msgspec.msgpack.encode(packed)


def packed_leap(data: bytes) -> Leap | None:
    """The leap that `pack_leap` was given, not checked; None where it lies as it is. Raises ProtocolError."""
    if not data.startswith(_BEGIN):
        return None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a leap of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        packed = _PACKED.decode(data)
        return _unpacked(packed, _LEAPS.decode(packed.message))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a leap that cannot be read: {str(error).splitlines()[0]}") from None


def _unpacked(packed: PackedLeap, bare: Leap) -> Leap:
    count = len(bare.blocks.state)  # a state is a byte
    columns = {
        "ids": unpack_deltas(packed.ids, count).astype(_IDS),
        "owner": unpack_deltas(packed.owner, count).astype(COLUMNS["owner"]),
        "last_used_step": ((bare.step - unpack(packed.age, count)) & _MASK).astype(COLUMNS["last_used_step"]),
    }
    hashes = hashed(bare.blocks.hash)
    parent = unpack_parents(packed.places, packed.told, hashes) if packed.places else b""
    told = {name: column.tobytes() for name, column in columns.items()}
    return replace(bare, blocks=replace(bare.blocks, parent=parent, **told))


def _column(data: bytes, form: np.dtype[np.generic]) -> Ints:
    return np.frombuffer(data, form).astype(np.int64)
