"""Address bins as a course keeps them: each column compressed, and shared with the second before where it is equal."""

from __future__ import annotations

from typing import Final

import zstandard

from kvscope_telemetry.summaries.summary import AddressBins

Packed = tuple[bytes, ...]
"""A compressed column each, in the order of `AddressBins`; empty for a column without bins."""

NOTHING: Final[Packed] = (b"",) * len(AddressBins.__struct_fields__)
_PLACES: Final = {name: place for place, name in enumerate(AddressBins.__struct_fields__)}
_LEVEL: Final = 1


class BinPacker:
    """Of one course, in one thread."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()
        self._last = AddressBins()
        self._last_packed = NOTHING

    def pack(self, bins: AddressBins) -> Packed:
        """The columns; one that is as in the bins that were packed before is the same object."""
        packed = tuple(
            before if column == last else self._compressor.compress(column)
            for column, last, before in zip(_columns(bins), _columns(self._last), self._last_packed, strict=True)
        )
        self._last, self._last_packed = bins, packed
        return packed

    def column(self, packed: Packed, name: str) -> bytes:
        """One column as it was."""
        column = packed[_PLACES[name]]
        return self._decompressor.decompress(column) if column else b""


def num_bytes(packed: Packed | None) -> int:
    """Memory of the columns, those included that others have as well."""
    return 0 if packed is None else sum(map(len, packed))


def _columns(bins: AddressBins) -> Packed:
    return tuple(getattr(bins, name) for name in AddressBins.__struct_fields__)
