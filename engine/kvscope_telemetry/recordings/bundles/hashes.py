"""Hashes of blocks and of those before them in their texts: numbers that nothing foretells, so each is told once.

A row's code says where its number comes from: as in the row before of that block, 0, told in full, and for parents
also the newest hash of the same owner, or one told anywhere in the bundle, by its place. Knows no messages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.integers import Ints, pack_deltas, unpack_deltas
from kvscope_telemetry.recordings.bundles.keyed import Keyed

_SAME, _ZERO, _TOLD, _OWNERS, _PLACED = range(5)
_Codes = npt.NDArray[np.uint8]


def pack_hashes(hashes: Ints, blocks: Keyed) -> tuple[bytes, bytes]:
    """Codes, and the hashes told in full."""
    codes = _codes(hashes, blocks)
    return codes.tobytes(), hashes[codes == _TOLD].astype("<i8").tobytes()


def unpack_hashes(data: tuple[bytes, bytes], blocks: Keyed, num_rows: int) -> tuple[Ints, _Codes]:
    """The hashes that `pack_hashes` was given, and their codes."""
    codes = _checked(data[0], num_rows, _TOLD)
    return _filled(codes, data[1], np.zeros(num_rows, np.int64), blocks), codes


def pack_parents(parents: Ints, hashes: Ints, owners: Keyed, blocks: Keyed) -> tuple[bytes, bytes, bytes]:
    """Codes, the parents told in full, and the places of others among the hashes that are."""
    codes = _codes(parents, blocks)
    is_told = _codes(hashes, blocks) == _TOLD
    by_owner = owners.before(owners.held(hashes, is_told))
    codes[(codes == _TOLD) & (by_owner == parents)] = _OWNERS
    told = hashes[is_told]
    order = np.argsort(told, kind="stable")
    left = np.flatnonzero(codes == _TOLD)
    places = np.zeros(0, np.int64)
    if order.size and left.size:
        at = order[np.minimum(np.searchsorted(told[order], parents[left]), order.size - 1)]
        is_found = told[at] == parents[left]
        codes[left[is_found]], places = _PLACED, at[is_found]
    return codes.tobytes(), parents[codes == _TOLD].astype("<i8").tobytes(), pack_deltas(places)


def unpack_parents(
    data: tuple[bytes, bytes, bytes], hashes: Ints, hash_codes: _Codes, owners: Keyed, blocks: Keyed
) -> Ints:
    """The parents that `pack_parents` was given."""
    codes = _checked(data[0], hashes.size, _PLACED)
    is_told = hash_codes == _TOLD
    known = np.zeros(hashes.size, np.int64)
    of_owner = codes == _OWNERS
    known[of_owner] = owners.before(owners.held(hashes, is_told))[of_owner]
    told, is_placed = hashes[is_told], codes == _PLACED
    places = unpack_deltas(data[2], int(is_placed.sum()))
    if np.any((places < 0) | (places >= told.size)):
        raise ProtocolError("a bundle with a hash that is told nowhere")
    known[is_placed] = told[places]
    return _filled(codes, data[1], known, blocks)


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
