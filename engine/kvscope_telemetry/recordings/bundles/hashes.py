"""Hashes of blocks and of those before them in their texts: numbers that nothing foretells, so each is told once.

A row's code says where its number comes from: as in the row before of that block, 0, told next, or by its place in the
list of hashes (`hash_lists`); for parents also the newest hash of the same owner. What is told next is told in that
list; in bundles of earlier versions it lies beside the codes, and places are among those. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.keyed import Keyed

_SAME, _ZERO, _TOLD, _OWNERS, _PLACED, _LISTED = range(6)
_NUM_CODES = 6
_Codes = npt.NDArray[np.uint8]

_EXPECTED_PARENT = np.array([_SAME, _SAME, _OWNERS, _SAME, _SAME, _PLACED], np.uint8)
"""By the code of the hash: of a block that was filled just now its owner filled the one before."""
_FORETOLD_PARENT = np.array([_SAME, _SAME, _OWNERS, _SAME, _SAME, _OWNERS], np.uint8)
"""The same for blocks of a request that lets go of them: they come together."""
FORETOLD = "full"
"""A column that bundles of earlier versions are without, in which less is foretold."""


@dataclass(frozen=True, slots=True)
class Hashes:
    """Of the rows of a bundle."""

    of_rows: Ints
    codes: _Codes
    listed: Ints
    """What places are of."""
    places: Ints
    """Of each row's own; what is not told anew is as in the row before."""

    @property
    def are_told(self) -> npt.NDArray[np.bool_]:
        """Rows of which the hash is told, not as it was."""
        found: npt.NDArray[np.bool_] = (self.codes == _TOLD) | (self.codes == _LISTED)
        return found


def pack_hashes(
    rows: Mapping[str, Ints], blocks: Keyed, into: HashList, log_time_ns: int
) -> tuple[dict[str, bytes], Hashes]:
    """Columns; what was not told before is told in `into`."""
    hashes = rows["hash"]
    codes = _codes(hashes, blocks)
    needed = np.flatnonzero(codes == _TOLD)
    firsts = np.sort(np.unique(hashes[needed], return_index=True)[1])
    fresh = needed[firsts[into.places(hashes[needed[firsts]]) < 0]]
    before = len(into)
    if fresh.size:
        into.tell(hashes[fresh], log_time_ns)
    codes[needed] = _LISTED
    codes[fresh] = _TOLD
    places = np.zeros(hashes.size, np.int64)
    places[needed] = into.places(hashes[needed])
    back = len(into) - places[codes == _LISTED]
    where = np.array([into.name, before, len(into)])
    expected = _expected(rows, blocks, is_listed=True)
    columns = {"hash": _less(codes, expected), "hash_list": pack(where), "hash_places": pack_deltas(back)}
    return columns, Hashes(hashes, codes, into.hashes, blocks.held(places, codes != _SAME))


def unpack_hashes(packed: Mapping[str, bytes], rows: Mapping[str, Ints], blocks: Keyed, lists: HashesOf) -> Hashes:
    """The hashes that `pack_hashes` was given, of which it had the other columns too."""
    num_rows = rows["state"].size
    if "hash_list" not in packed:
        return _hashes_beside(packed, blocks, num_rows)
    is_foretold = FORETOLD in packed
    expected = _expected(rows, blocks, is_listed=is_foretold)
    codes = _with(_checked(packed["hash"], num_rows, _LISTED), expected)
    name, before, end = unpack(packed["hash_list"], 3).tolist()
    is_told, is_listed = codes == _TOLD, codes == _LISTED
    if before + int(is_told.sum()) != end:
        raise ProtocolError(f"a bundle that tells {end} hashes after {before}")
    places = np.zeros(num_rows, np.int64)
    places[is_told] = np.arange(before, end)
    back = (unpack_deltas if is_foretold else unpack)(packed["hash_places"], int(is_listed.sum()))
    places[is_listed] = end - back
    listed = lists(name, end) if end else np.zeros(0, np.int64)
    known = np.zeros(num_rows, np.int64)
    is_there = is_told | is_listed
    known[is_there] = listed_at(listed, places[is_there])
    is_new = codes != _SAME
    return Hashes(blocks.held(known, is_new), codes, listed, blocks.held(places, is_new))


def listed_at(listed: Ints, places: Ints) -> Ints:
    """The hashes at these places. Raises ProtocolError where there are none."""
    if np.any((places < 0) | (places >= listed.size)):
        raise ProtocolError("a hash that is told nowhere")
    found: Ints = listed[places]
    if not found.all():
        raise ProtocolError("a hash of a part that cannot be read")
    return found


def pack_parents(parents: Ints, hashes: Hashes, told: HashList, owners: Keyed, blocks: Keyed) -> dict[str, bytes]:
    """Codes, the parents told in full, and how far before the row's own the places of others are."""
    codes = _codes(parents, blocks)
    by_owner = owners.before(owners.held(hashes.of_rows, hashes.are_told))
    codes[(codes == _TOLD) & (by_owner == parents)] = _OWNERS
    left = np.flatnonzero(codes == _TOLD)
    at = told.places(parents[left])
    codes[left[at >= 0]] = _PLACED
    back = (hashes.places[left] - at)[at >= 0]
    in_full = parents[codes == _TOLD].astype("<i8").tobytes()
    return {"parent": _less(codes, _FORETOLD_PARENT[hashes.codes]), "parents": in_full, "parent_places": pack(back)}


def unpack_parents(packed: Mapping[str, bytes], hashes: Hashes, owners: Keyed, blocks: Keyed) -> Ints:
    """The parents that `pack_parents` was given."""
    is_listed = "hash_list" in packed
    codes = _checked(packed["parent"], hashes.codes.size, _LISTED if is_listed else _PLACED)
    expected = _FORETOLD_PARENT if FORETOLD in packed else _EXPECTED_PARENT
    codes = _with(codes, expected[hashes.codes]) if is_listed else codes
    known = np.zeros(codes.size, np.int64)
    of_owner, is_placed = codes == _OWNERS, codes == _PLACED
    known[of_owner] = owners.before(owners.held(hashes.of_rows, hashes.are_told))[of_owner]
    count = int(is_placed.sum())
    if is_listed:
        places = hashes.places[is_placed] - unpack(packed["parent_places"], count)
    else:
        places = unpack_deltas(packed["parent_places"], count)
    known[is_placed] = listed_at(hashes.listed, places)
    return _filled(codes, packed["parents"], known, blocks)


def _expected(rows: Mapping[str, Ints], blocks: Keyed, *, is_listed: bool) -> _Codes:
    """The code that a row would have of which nothing is known but the other columns: a block has a hash once it is
    full, and as long as it is; `is_listed`: one that is named for the first time, and is held by nobody, has been."""
    filled = rows["filled"]
    before, full = blocks.before(filled), filled.max(initial=1)
    codes = np.full(filled.size, _SAME, np.uint8)
    codes[(filled == full) & (before != full)] = _TOLD
    codes[(filled != full) & (before == full)] = _ZERO
    if is_listed:
        first = blocks.firsts
        codes[first[(rows["state"][first] == BlockState.CACHED) & (filled[first] == full)]] = _LISTED
    return codes


def _less(codes: _Codes, expected: _Codes) -> bytes:
    """0 for each that is as expected."""
    return ((codes + _NUM_CODES - expected) % _NUM_CODES).astype(np.uint8).tobytes()


def _with(told: _Codes, expected: _Codes) -> _Codes:
    """The codes that `_less` was given."""
    codes: _Codes = ((told + expected) % _NUM_CODES).astype(np.uint8)
    return codes


def _hashes_beside(packed: Mapping[str, bytes], blocks: Keyed, num_rows: int) -> Hashes:
    """Of a bundle of an earlier version."""
    codes = _checked(packed["hash"], num_rows, _TOLD)
    hashes = _filled(codes, packed["hashes"], np.zeros(num_rows, np.int64), blocks)
    return Hashes(hashes, codes, hashes[codes == _TOLD], np.zeros(num_rows, np.int64))


def _codes(values: Ints, blocks: Keyed) -> _Codes:
    codes = np.full(values.size, _TOLD, np.uint8)
    codes[values == 0] = _ZERO
    codes[values == blocks.before(values)] = _SAME
    return codes


def _checked(data: bytes, num_rows: int, most: int) -> _Codes:
    codes = np.frombuffer(data, np.uint8)
    if codes.size != num_rows or np.any(codes > most):
        raise ProtocolError(f"a bundle with {codes.size} codes of hashes for {num_rows} rows")
    return codes


def _filled(codes: _Codes, told: bytes, known: Ints, blocks: Keyed) -> Ints:
    """`known`, with what is told in full and what is as it was."""
    is_told = codes == _TOLD
    if len(told) != 8 * int(is_told.sum()):
        raise ProtocolError(f"a bundle with {len(told)} bytes of hashes")
    known[is_told] = np.frombuffer(told, "<i8")
    return blocks.held(known, codes != _SAME)
