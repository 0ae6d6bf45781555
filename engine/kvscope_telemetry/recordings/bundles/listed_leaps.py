"""Leaps whose blocks lie owner by owner, each in the order in which it filled them: neighbours are alike.

Such a leap lies in a recording without its blocks; beside it their columns, by name. Hashes are places in a list
(`hash_lists`), which has that order: -1 without one, the length of the list where it is told in full. Knows no files;
what is read is checked for what this needs, the leap where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, BlockRows
from kvscope_telemetry.messages.leap import Leap, encode_leap
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, RequestInfo, RequestRows
from kvscope_telemetry.recordings.bundles.groups import MAX_ROWS, Groups, joined, joined_as, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.hashes import listed_at
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_table, unpack, unpack_table
from kvscope_telemetry.recordings.bundles.packed_leaps import pack_leap
from kvscope_telemetry.recordings.bundles.references import Known, pack_ids, unpack_ids
from kvscope_telemetry.recordings.bundles.request_columns import IF_ANY, REQUEST_COLUMNS
from kvscope_telemetry.recordings.bundles.struct_columns import StructColumns
from kvscope_telemetry.recordings.bundles.struct_makers import make_request_info

_MASK: Final = (1 << 32) - 1
_IDS: Final = np.dtype("<u4")
_BY_ROW: Final = tuple(name for name in DENSE if name != "hash")
_NUM_COLUMNS: Final = 3 + len(_BY_ROW)
"""Ids, the order of rows, places of hashes, and these."""


_REQUESTS: Final = StructColumns(RequestInfo, make_request_info)
_REQUEST: Final = "new_requests."
_CHANGED: Final = "requests."


class ListedLeap(msgspec.Struct, frozen=True, tag=True):
    """As it lies in a recording."""

    message: bytes
    """A leap without blocks, and without requests that came; of those that changed it has what few tell."""
    num_rows: int
    list: int
    """Name of the list of hashes, 0 for none."""
    num_listed: int
    """How many it had."""
    columns: dict[str, bytes]


_BEGIN: Final = msgspec.msgpack.encode(ListedLeap(b"", 0, 0, 0, {}))[:17]
"""Map of six, and the tag: no other message begins so."""
_LISTED: Final = msgspec.msgpack.Decoder(ListedLeap)
_LEAPS: Final = msgspec.msgpack.Decoder(Leap)


def pack_listed_leap(leap: Leap, told: HashList) -> bytes:
    """`leap` as it is written behind the parts of `told`."""
    blocks = leap.blocks
    ids = _column(blocks.ids, _IDS)
    if not ids.size or np.any(np.diff(ids) <= 0):
        return pack_leap(leap)
    rows = {name: _column(getattr(blocks, name), COLUMNS[name]) for name in DENSE}
    places = told.places(rows["hash"])
    places[rows["hash"] == 0] = -1
    places[(rows["hash"] != 0) & (places < 0)] = len(told)
    order = np.lexsort((places, rows["owner"]))
    rows, places = {name: column[order] for name, column in rows.items()}, places[order]
    rows["last_used_step"] = leap.step - rows["last_used_step"]
    columns = {"rows": pack_table([ids, order, places, *(rows[name] for name in _BY_ROW)])}
    columns["hashes"] = rows["hash"][places == len(told)].tobytes()
    if blocks.parent:
        parents = np.zeros(ids.size, np.int64)
        parents[_column(blocks.hash, COLUMNS["hash"]) != 0] = _column(blocks.parent, COLUMNS["parent"])
        columns |= _pack_parents(parents[order], places, told)
    measured = BlockRows(**{name: getattr(blocks, name) for name in MEASURED})
    columns |= {_REQUEST + name: data for name, data in _REQUESTS.pack([leap.new_requests], _time(leap)).items()}
    columns |= {_CHANGED + name: data for name, data in _pack_requests(leap.requests, ids[order]).items()}
    guessed = RequestRows(**{name: getattr(leap.requests, name) for name in IF_ANY})
    bare = encode_leap(replace(leap, blocks=measured, new_requests=(), requests=guessed))
    return msgspec.msgpack.encode(ListedLeap(bare, ids.size, told.name, len(told), columns))


def listed_leap(data: bytes, lists: HashesOf) -> Leap | None:
    """The leap that `pack_listed_leap` was given, not checked; None for what is none. Raises ProtocolError."""
    if not data.startswith(_BEGIN):
        return None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a leap of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        lies = _LISTED.decode(data)
        if not 0 < lies.num_rows <= MAX_ROWS:
            raise ProtocolError(f"a leap of {lies.num_rows} rows: 1 to {MAX_ROWS} are accepted")
        listed = lists(lies.list, lies.num_listed) if lies.num_listed else np.zeros(0, np.int64)
        return _unpacked(lies, _LEAPS.decode(lies.message), listed)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a leap that cannot be read: {str(error).splitlines()[0]}") from None
    except KeyError as error:
        raise ProtocolError(f"a leap without its column {error}") from None


def bare_leap(data: bytes) -> Leap | None:
    """A leap that lies so without its blocks and requests, not checked; None for what is none. Raises ProtocolError."""
    if not data.startswith(_BEGIN):
        return None
    try:
        return _LEAPS.decode(_LISTED.decode(data).message)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a leap that cannot be read: {str(error).splitlines()[0]}") from None


def _unpacked(lies: ListedLeap, bare: Leap, listed: Ints) -> Leap:
    packed, count = lies.columns, lies.num_rows
    table = unpack_table(packed["rows"], _NUM_COLUMNS, count)
    ids, order, places = table[:3]
    back = np.full(count, -1)
    back[order[(order >= 0) & (order < count)]] = np.arange(count)[(order >= 0) & (order < count)]
    if np.any(back < 0):
        raise ProtocolError("a leap whose rows are in no order")
    rows = dict(zip(_BY_ROW, table[3:, back], strict=True))
    rows["last_used_step"] = (bare.step - rows["last_used_step"]) & _MASK
    hashes = _hashes(places, packed["hashes"], listed)
    rows["hash"] = hashes[back]
    told = {name: rows[name].astype(COLUMNS[name]).tobytes() for name in DENSE}
    parent = b""
    if "parents" in packed:
        parents = _parents(packed, places, listed)[back]
        parent = parents[rows["hash"] != 0].tobytes()
    requests = _unpack_requests(_named(packed, _CHANGED), ids[order])
    requests = replace(requests, **{name: getattr(bare.requests, name) for name in IF_ANY})
    (new_requests,) = _REQUESTS.unpack(_named(packed, _REQUEST), _time(bare))
    blocks = replace(bare.blocks, ids=ids.astype(_IDS).tobytes(), parent=parent, **told)
    return replace(bare, blocks=blocks, new_requests=new_requests, requests=requests)


def _hashes(places: Ints, told_in_full: bytes, listed: Ints) -> Ints:
    hashes = np.zeros(places.size, np.int64)
    is_listed, is_told = (places >= 0) & (places < listed.size), places == listed.size
    if np.any((places < -1) | (places > listed.size)) or len(told_in_full) != 8 * int(is_told.sum()):
        raise ProtocolError("a leap with hashes that are told nowhere")
    hashes[is_listed] = listed_at(listed, places[is_listed])
    hashes[is_told] = np.frombuffer(told_in_full, "<i8")
    return hashes


def _pack_parents(parents: Ints, places: Ints, told: HashList) -> dict[str, bytes]:
    """How far before the place of the row before each parent's is, but that 0 is one that is told in full; of rows with
    a hash."""
    parents, before = parents[places >= 0], _before(places[places >= 0])
    at = told.places(parents)
    back = np.where(at >= 0, before - at + (at <= before), 0)
    return {"parents": pack(back), "parents_in_full": parents[back == 0].tobytes()}


def _parents(packed: Mapping[str, bytes], places: Ints, listed: Ints) -> Ints:
    """Of every row; 0 without a hash."""
    is_hashed = places >= 0
    back = unpack(packed["parents"], int(is_hashed.sum()))
    parents, is_told = np.zeros(back.size, np.int64), back == 0
    told = np.frombuffer(packed["parents_in_full"], "<i8")
    if told.size != int(is_told.sum()):
        raise ProtocolError("a leap with parents that are told nowhere")
    parents[~is_told] = listed_at(listed, (_before(places[is_hashed]) - back + (back > 0))[~is_told])
    parents[is_told] = told
    whole = np.zeros(places.size, np.int64)
    whole[is_hashed] = parents
    return whole


def _before(places: Ints) -> Ints:
    """The place of the row before: an owner's blocks lie in the order in which it filled them."""
    before: Ints = np.concatenate((np.zeros(1, np.int64), places[:-1]))
    return before[: places.size]


def _time(leap: Leap) -> Ints:
    return np.array([leap.time_ns], np.int64)


def _pack_requests(rows: RequestRows, ids: Ints) -> dict[str, bytes]:
    """Columns of requests that changed; blocks of their tables by where they stand among `ids`. Raises ValueError for
    columns that are longer or shorter than they should be."""
    groups = Groups.counted(np.array([len(rows.number) // 4]))
    columns = [joined_as([getattr(rows, name)], form, groups.counts) for name, form in REQUEST_COLUMNS.items()]
    packed = {"columns": pack_table(columns)}
    table, table_groups = joined([rows.table_blocks], "<u4")
    packed["rows"], packed["table_rows"] = pack_counts(groups), pack_counts(table_groups)
    known = Known(ids, Groups.counted(np.array([ids.size])))
    return packed | dict(zip(("table", "new_table"), pack_ids(table, table_groups, known), strict=True))


def _unpack_requests(packed: Mapping[str, bytes], ids: Ints) -> RequestRows:
    groups, table_groups = unpack_counts(packed["rows"], 1), unpack_counts(packed["table_rows"], 1)
    told_columns = unpack_table(packed["columns"], len(REQUEST_COLUMNS), groups.num_rows)
    columns = {
        name: column.astype(form).tobytes()
        for (name, form), column in zip(REQUEST_COLUMNS.items(), told_columns, strict=True)
    }
    told = (packed["table"], packed["new_table"])
    table = unpack_ids(told, table_groups, ids, Groups.counted(np.array([ids.size])))
    return RequestRows(**columns, table_blocks=table.astype("<u4").tobytes())


def _named(packed: Mapping[str, bytes], begin: str) -> dict[str, bytes]:
    return {name.removeprefix(begin): data for name, data in packed.items() if name.startswith(begin)}


def _column(data: bytes, form: np.dtype[np.generic]) -> Ints:
    return np.frombuffer(data, form).astype(np.int64)
