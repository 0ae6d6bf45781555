"""Leaps whose blocks lie owner by owner, each in the order in which it filled them: neighbours are alike.

Such a leap lies in a recording without its blocks; beside it their columns, by name. Hashes are places in a list
(`hash_lists`), which has that order: -1 without one, the length of the list where it is told in full. Knows no files;
they are read by `opened_leaps`.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import COLUMNS, DENSE, MEASURED, BlockRows
from kvscope_telemetry.messages.leap import Leap, encode_leap
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, RequestInfo, RequestRows
from kvscope_telemetry.recordings.bundles.groups import MAX_ROWS, Groups, joined, joined_as, pack_counts
from kvscope_telemetry.recordings.bundles.hash_lists import HashList
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_table, readable
from kvscope_telemetry.recordings.bundles.leaps.packed_leaps import pack_leap
from kvscope_telemetry.recordings.bundles.references import Known, pack_ids
from kvscope_telemetry.recordings.bundles.request_columns import IF_ANY, REQUEST_COLUMNS
from kvscope_telemetry.recordings.bundles.struct_columns import StructColumns
from kvscope_telemetry.recordings.bundles.struct_makers import make_request_info

_IDS: Final = np.dtype("<u4")
BY_ROW: Final = tuple(name for name in DENSE if name != "hash")
NUM_COLUMNS: Final = 3 + len(BY_ROW)
"""Ids, the order of rows, places of hashes, and these."""
NEW_REQUESTS: Final = StructColumns(RequestInfo, make_request_info)
NEW_REQUEST: Final = "new_requests."
CHANGED: Final = "requests."
"""What the names of their columns begin with."""


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
    columns = {"rows": pack_table([ids, order, places, *(rows[name] for name in BY_ROW)])}
    columns["hashes"] = rows["hash"][places == len(told)].tobytes()
    if blocks.parent:
        parents = np.zeros(ids.size, np.int64)
        parents[_column(blocks.hash, COLUMNS["hash"]) != 0] = _column(blocks.parent, COLUMNS["parent"])
        columns |= _pack_parents(parents[order], places, told)
    measured = BlockRows(**{name: getattr(blocks, name) for name in MEASURED})
    columns |= {
        NEW_REQUEST + name: data for name, data in NEW_REQUESTS.pack([leap.new_requests], time_of(leap)).items()
    }
    columns |= {CHANGED + name: data for name, data in _pack_requests(leap.requests, ids[order]).items()}
    guessed = RequestRows(**{name: getattr(leap.requests, name) for name in IF_ANY})
    bare = encode_leap(replace(leap, blocks=measured, new_requests=(), requests=guessed))
    return msgspec.msgpack.encode(ListedLeap(bare, ids.size, told.name, len(told), columns))


def lying_leap(data: bytes) -> ListedLeap | None:
    """What `pack_listed_leap` gave; None for what is none. Raises ProtocolError, and msgspec's errors."""
    if not data.startswith(_BEGIN):
        return None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a leap of {len(data)} bytes is refused: at most {MAX_MESSAGE_BYTES} are accepted")
    lies = _LISTED.decode(data)
    if not 0 < lies.num_rows <= MAX_ROWS:
        raise ProtocolError(f"a leap of {lies.num_rows} rows: 1 to {MAX_ROWS} are accepted")
    return lies


def bare_of(lies: ListedLeap) -> Leap:
    """The leap without its blocks and requests, not checked. Raises msgspec's errors."""
    return _LEAPS.decode(lies.message)


def bare_leap(data: bytes) -> Leap | None:
    """A leap that lies so without its blocks and requests, not checked; None for what is none. Raises ProtocolError."""
    with readable("a leap"):
        lies = lying_leap(data)
        return None if lies is None else bare_of(lies)


def _pack_parents(parents: Ints, places: Ints, told: HashList) -> dict[str, bytes]:
    """How far before the place of the row before each parent's is, but that 0 is one that is told in full; of rows with
    a hash."""
    parents, places = parents[places >= 0], places[places >= 0]
    before = before_each(places, np.zeros(places.size, np.int64))
    at = told.places(parents)
    back = np.where(at >= 0, before - at + (at <= before), 0)
    return {"parents": pack(back), "parents_in_full": parents[back == 0].tobytes()}


def before_each(places: Ints, leaps: Ints) -> Ints:
    """The place of the row before in the same of `leaps`, 0 in its first: an owner's blocks lie in the order in which
    it filled them."""
    before: Ints = np.concatenate((np.zeros(1, np.int64), places[:-1]))[: places.size]
    before[np.diff(leaps, prepend=-1) != 0] = 0
    return before


def time_of(leap: Leap) -> Ints:
    """Of the group that its requests are."""
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


def _column(data: bytes, form: np.dtype[np.generic]) -> Ints:
    return np.frombuffer(data, form).astype(np.int64)
