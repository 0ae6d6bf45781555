"""Keyframes whose blocks lie column by column, those of an owner side by side: neighbours are alike.

Such a keyframe lies in a recording without its blocks; beside it their columns. Owners lie in the order of the blocks,
all else in the order of owners, which follows from them. A hash is a place in the lists of hashes (`hash_lists`) that
it names, one after another, where it was told in one; parents lie as in `placed_parents`. Knows no files; what is read
is checked for what this needs, the keyframe where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, BlockRows, Ledger
from kvscope_telemetry.messages.pieces import Pieces
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Hello, Snapshot
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.bundles.hash_lists import MAX_EARLIER_LISTS, HashesOf, ToldList, places_among
from kvscope_telemetry.recordings.bundles.hashes import listed_at
from kvscope_telemetry.recordings.bundles.integers import (
    Ints,
    groups_of,
    order_of,
    pack_deltas,
    readable,
    starts_of,
    unpack_deltas,
    unpack_deltas_as,
)
from kvscope_telemetry.recordings.bundles.placed_parents import keyframe_pieces, pack_parents, unpack_parents

MAX_LISTED_ROWS: Final = 1 << 18
"""Of a keyframe that lies so: more rows would hold other threads up for too long."""
_NO_HASH, _IN_FULL, _LISTED = range(3)
_BY_OWNER: Final = tuple(name for name in DENSE if name not in ("owner", "hash"))


@dataclass(frozen=True, slots=True)
class WholeState:
    """What a keyframe says."""

    snapshot: Snapshot
    """Its own blocks are not looked at."""
    ledger: Ledger
    """Every row; it must not change before it is written."""


class ListedKeyframe(msgspec.Struct, frozen=True, tag=True):
    """As it lies in a recording."""

    message: bytes
    """A snapshot without blocks, but for what only some engines measure of them."""
    num_rows: int
    lists: tuple[tuple[int, int], ...]
    """Name, and how many hashes of it are meant."""
    columns: dict[str, bytes]


_BEGIN: Final = msgspec.msgpack.encode(ListedKeyframe(b"", 0, (), {}))[:21]
"""Map of five, and the tag: no other message begins so."""
_LISTED_KEYFRAMES: Final = msgspec.msgpack.Decoder(ListedKeyframe)
_SNAPSHOTS: Final = msgspec.msgpack.Decoder(Snapshot)


def whole_pieces(state: WholeState, told: Sequence[ToldList]) -> Pieces:
    """`state` as it is written behind the lists `told`: in one piece, or, of more rows than `MAX_LISTED_ROWS`, without
    them, as views of its ledger."""
    if not 0 < state.ledger.num_blocks <= MAX_LISTED_ROWS:
        return keyframe_pieces(state.snapshot, state.ledger)
    blocks = state.ledger.pack_all()
    rows = {name: np.frombuffer(getattr(blocks, name), COLUMNS[name]).astype(np.int64) for name in DENSE}
    order = order_of(rows["owner"])
    columns = {"owner": pack_deltas(rows["owner"])}
    columns |= {name: pack_deltas(rows[name][order]) for name in _BY_OWNER}
    parents = np.zeros(order.size, np.int64)
    if blocks.parent:
        parents[rows["hash"] != 0] = np.frombuffer(blocks.parent, "<i8")
    hashes = rows["hash"][order]
    is_hashed = hashes != 0
    named, told_hashes = _pack_hashes(hashes, told[::-1])  # what was told twice was so in the newest
    columns |= told_hashes
    in_order = parents[order][is_hashed].tobytes() if blocks.parent else b""
    columns["parents"], columns["parents_in_full"] = pack_parents(hashes[is_hashed], in_order)
    measured = BlockRows(**{name: getattr(blocks, name) for name in MEASURED})
    bare = encode(replace(state.snapshot, blocks=measured))
    lists = tuple((each.name, int(each.hashes.size)) for each in named)
    return [msgspec.msgpack.encode(ListedKeyframe(bare, order.size, lists, columns))]


def untold_hashes(state: WholeState, told: Sequence[ToldList]) -> Ints:
    """Hashes of `state` that lie in none of `told`, in its order: told in a list before it, the next keyframes can name
    them too. None of a state that does not lie so."""
    ledger = state.ledger
    if not 0 < ledger.num_blocks <= MAX_LISTED_ROWS:
        return np.zeros(0, np.int64)
    hashes = ledger.hash[order_of(ledger.owner.astype(np.int64))].view(np.int64)
    among = _among(told)
    fresh = hashes[(hashes != 0) & (places_among(among, np.argsort(among, kind="stable"), hashes) < 0)]
    firsts = np.sort(np.unique(fresh, return_index=True)[1])
    told_once: Ints = fresh[firsts]
    return told_once


def listed_keyframe(data: bytes, lists: HashesOf) -> Snapshot | None:
    """The whole state that `whole_pieces` was given, not checked; None for what lies otherwise. Raises
    ProtocolError."""
    lies = _decoded(data)
    if lies is None:
        return None
    with readable("a keyframe"):
        return _unpacked(lies, _SNAPSHOTS.decode(lies.message), lists)


def hello_of(data: bytes) -> Hello | None:
    """Of a keyframe that lies so, without its blocks and not checked; None for what lies otherwise. Raises
    ProtocolError."""
    bare = bare_keyframe(data)
    return None if bare is None else bare[0].hello


def bare_keyframe(data: bytes) -> tuple[Snapshot, tuple[int, ...]] | None:
    """A keyframe that lies so without its blocks, not checked, and the lists it refers to, by name; None for what lies
    otherwise. Raises ProtocolError."""
    lies = _decoded(data)
    if lies is None:
        return None
    with readable("a keyframe"):
        return _SNAPSHOTS.decode(lies.message), tuple(name for name, _ in lies.lists)


def _decoded(data: bytes) -> ListedKeyframe | None:
    if not data.startswith(_BEGIN):
        return None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a keyframe of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    with readable("a keyframe"):
        lies = _LISTED_KEYFRAMES.decode(data)
    if not 0 < lies.num_rows <= MAX_LISTED_ROWS:
        raise ProtocolError(f"a keyframe of {lies.num_rows} rows: 1 to {MAX_LISTED_ROWS} are accepted")
    if len(lies.lists) > 1 + MAX_EARLIER_LISTS:
        raise ProtocolError(f"a keyframe of {len(lies.lists)} lists: at most {1 + MAX_EARLIER_LISTS} are accepted")
    return lies


def _unpacked(lies: ListedKeyframe, bare: Snapshot, lists: HashesOf) -> Snapshot:
    packed, count = lies.columns, lies.num_rows
    owners = unpack_deltas(packed["owner"], count)
    order = order_of(owners)
    told = {"owner": owners.astype(COLUMNS["owner"]).tobytes()}
    for name in _BY_OWNER:
        told[name] = _back(unpack_deltas_as(packed[name], count, COLUMNS[name]), order)
    hashes = _unpack_hashes(lies, lists)
    is_hashed = hashes != 0
    told["hash"] = _back(hashes, order)
    if packed["parents"]:
        parents = np.zeros(count, np.int64)
        in_order = unpack_parents(packed["parents"], packed["parents_in_full"], hashes[is_hashed])
        parents[order[is_hashed]] = np.frombuffer(in_order, "<i8")
        told["parent"] = parents[np.frombuffer(told["hash"], "<i8") != 0].tobytes()
    return replace(bare, blocks=replace(bare.blocks, **told))


def _pack_hashes(hashes: Ints, told: Sequence[ToldList]) -> tuple[Sequence[ToldList], dict[str, bytes]]:
    """The lists that have any; where each hash is from, those that were told by their places, and the others."""
    among = _among(told)
    places = places_among(among, np.argsort(among, kind="stable"), hashes)
    is_listed, is_hashed = places >= 0, hashes != 0
    sizes = np.array([each.hashes.size for each in told], np.int64)
    lists = groups_of(sizes)
    is_named = np.bincount(lists[places[is_listed & is_hashed]], minlength=sizes.size) > 0
    left_out = starts_of(np.where(is_named, 0, sizes))[:-1]
    places[is_listed] -= left_out[lists[places[is_listed]]]
    codes = np.where(is_listed, _LISTED, _IN_FULL).astype(np.uint8)
    codes[~is_hashed] = _NO_HASH
    return [each for each, is_there in zip(told, is_named.tolist(), strict=True) if is_there], {
        "codes": codes.tobytes(),
        "places": pack_deltas(places[codes == _LISTED]),
        "hashes": hashes[codes == _IN_FULL].tobytes(),
    }


def _among(told: Sequence[ToldList]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *(each.hashes for each in told)])


def _unpack_hashes(lies: ListedKeyframe, lists: HashesOf) -> Ints:
    """Of every row, in the order of owners."""
    codes = np.frombuffer(lies.columns["codes"], np.uint8)
    is_told, is_listed = codes == _IN_FULL, codes == _LISTED
    told = np.frombuffer(lies.columns["hashes"], "<i8")
    if codes.size != lies.num_rows or np.any(codes > _LISTED) or told.size != int(is_told.sum()) or not told.all():
        raise ProtocolError("a keyframe with hashes that are told nowhere")
    among = np.concatenate([np.zeros(0, np.int64), *(lists(name, count) for name, count in lies.lists)])
    hashes = np.zeros(codes.size, np.int64)
    hashes[is_told] = told
    hashes[is_listed] = listed_at(among, unpack_deltas(lies.columns["places"], int(is_listed.sum())))
    return hashes


def _back(in_order: np.ndarray[tuple[int, ...], np.dtype[np.generic]], order: Ints) -> bytes:
    """In the order of the blocks."""
    values = np.empty_like(in_order)
    values[order] = in_order
    return values.tobytes()
