"""Keyframes and leaps without the hashes that they tell twice: a block's parent is mostly another block's hash.

Such a message lies in a recording without its parents, and beside it each parent as the place of that hash: how many
rows before it, of those with a hash; 0 is a parent that is told in full. Knows no files; what is read is checked for
what this needs, the message where it goes.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import Ledger
from kvscope_telemetry.messages.leap import Leap, encode_leap
from kvscope_telemetry.messages.pieces import Pieces, head_of_bytes, snapshot_pieces
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Snapshot
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, unpack

Stated = Leap | Snapshot
"""Rows of the ledger as they stand at a time."""


class PlacedParents(msgspec.Struct, frozen=True, tag=True):
    """As it lies in a recording."""

    message: bytes
    """Without parents."""
    places: bytes
    told: bytes
    """u8 a parent that is told in full."""


_BEGIN: Final = msgspec.msgpack.encode(PlacedParents(b"", b"", b""))[:20]
"""Map of four, and the tag: no other message begins so."""
_MESSAGE_KEY: Final = msgspec.msgpack.encode("message")
_NO_MESSAGE: Final = _MESSAGE_KEY + msgspec.msgpack.encode(b"")
MAX_PLACED_ROWS: Final = 1 << 20
"""Of a keyframe: to find the parents takes a quarter of a microsecond a row, and some memory."""
_PLACED: Final = msgspec.msgpack.Decoder(PlacedParents)
_STATED: Final[msgspec.msgpack.Decoder[Stated]] = msgspec.msgpack.Decoder(Stated)


def without_parents(message: Stated) -> bytes:
    """`message` as it is written; as it is where it has no parents."""
    blocks = message.blocks
    if not blocks.parent:
        return encoded(message)
    places, told = pack_parents(hashed(blocks.hash), blocks.parent)
    bare = encoded(replace(message, blocks=replace(blocks, parent=b"")))
    return msgspec.msgpack.encode(PlacedParents(bare, places, told))


def keyframe_pieces(snapshot: Snapshot, ledger: Ledger) -> Pieces:
    """`snapshot`, whose own blocks are not looked at, with every row of `ledger`, as it is written: in pieces that are
    views of the ledger, which must not change before. Of more rows than `MAX_PLACED_ROWS` it keeps its parents."""
    is_hashed = ledger.hash != 0
    parents = ledger.parent[is_hashed].view(np.int64)
    if ledger.num_blocks > MAX_PLACED_ROWS or not parents.any():
        return snapshot_pieces(snapshot, ledger)
    places, told = _placed(ledger.hash[is_hashed].view(np.int64), parents)
    bare = snapshot_pieces(snapshot, ledger, has_parents=False)
    before, after = msgspec.msgpack.encode(PlacedParents(b"", places, told)).split(_NO_MESSAGE, 1)
    return [before + _MESSAGE_KEY, head_of_bytes(sum(map(len, bare))), *bare, after]


def with_parents(data: bytes) -> bytes:
    """The bytes of the message that `without_parents` was given; any others as they are. Raises ProtocolError."""
    message = stated(data)
    return data if message is None else encoded(message)


def stated(data: bytes) -> Stated | None:
    """The message that `without_parents` was given, not checked; None where it lies as it is. Raises ProtocolError."""
    if not data.startswith(_BEGIN):
        return None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        placed = _PLACED.decode(data)
        message = _STATED.decode(placed.message)
        parents = unpack_parents(placed.places, placed.told, hashed(message.blocks.hash))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a keyframe or leap that cannot be read: {str(error).splitlines()[0]}") from None
    return replace(message, blocks=replace(message.blocks, parent=parents))


def hashed(column: bytes) -> Ints:
    """The hashes of a column, without the rows that have none."""
    hashes: Ints = np.frombuffer(column, "<i8").astype(np.int64)
    told: Ints = hashes[hashes != 0]
    return told


def pack_parents(hashes: Ints, parents: bytes) -> tuple[bytes, bytes]:
    """The places of u8 `parents` among `hashes`, and those that are told in full."""
    if not parents:
        return b"", b""
    return _placed(hashes, np.frombuffer(parents, "<i8"))


def unpack_parents(places: bytes, told: bytes, hashes: Ints) -> bytes:
    """The parents that `pack_parents` was given. Raises ProtocolError and ValueError."""
    return _parents(places, told, hashes).astype("<i8", copy=False).tobytes()


def _placed(hashes: Ints, parents: Ints) -> tuple[bytes, bytes]:
    """Places, and the parents that are told in full."""
    order = np.argsort(hashes, kind="stable")
    at = order[np.minimum(np.searchsorted(hashes[order], parents), order.size - 1)]
    places = np.where(hashes[at] == parents, np.arange(order.size) - at, 0)
    return pack(places), parents[places == 0].tobytes()


def _parents(packed_places: bytes, told_in_full: bytes, hashes: Ints) -> Ints:
    places = unpack(packed_places, hashes.size)
    sources, is_told = np.arange(hashes.size) - places, places == 0
    told = np.frombuffer(told_in_full, "<i8")
    if np.any((sources < 0) | (sources >= hashes.size)) or told.size != int(is_told.sum()):
        raise ProtocolError("a keyframe or leap with parents that are told nowhere")
    parents: Ints = hashes[sources]
    parents[is_told] = told
    return parents


def encoded(message: Stated) -> bytes:
    """As it came."""
    return encode_leap(message) if isinstance(message, Leap) else encode(message)
