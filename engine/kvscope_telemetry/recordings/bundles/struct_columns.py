"""Small structs of many frames, such as events, as columns: a column a field, and back.

Whole numbers lie as such, those that are times by how far they are from their frame's. Other values lie once each, with
which of them is meant; a field that has its default everywhere lies nowhere. Knows no messages but by their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.groups import Groups, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_ROWS: Final = "rows"
_WHICH: Final = "_which"
_TIME: Final = "_ns"


class StructColumns(Generic[_Struct]):
    """Of structs of `kind`, in groups: a group a frame. `make` makes one of its fields in their order."""

    def __init__(self, kind: type[_Struct], make: Callable[..., _Struct]) -> None:
        self._make = make
        self._fields = {field.name: field for field in msgspec.structs.fields(kind)}
        self._values_of = attrgetter(*self._fields)
        self._values = {
            name: msgspec.msgpack.Decoder(list[field.type])  # type: ignore[name-defined]
            for name, field in self._fields.items()
            if field.type is not int
        }

    def pack(self, parts: Sequence[tuple[_Struct, ...]], times_ns: Ints) -> dict[str, bytes]:
        """`parts` a frame, with its time. Raises OverflowError for a number that has no room."""
        structs = tuple(chain.from_iterable(parts))
        if not structs:
            return {}
        groups = Groups.counted(np.fromiter(map(len, parts), np.int64, len(parts)))
        packed = {_ROWS: pack_counts(groups)}
        for (name, field), values in zip(
            self._fields.items(), zip(*map(self._values_of, structs), strict=True), strict=True
        ):
            if values.count(field.default) == len(values):
                continue
            if name in self._values:
                packed |= _pack_values(name, values)
            elif name.endswith(_TIME):
                packed[name] = pack(np.array(values, np.int64) - times_ns[groups.of])
            else:
                packed[name] = pack_deltas(np.array(values, np.int64))
        return packed

    def unpack(self, packed: Mapping[str, bytes], times_ns: Ints) -> list[tuple[_Struct, ...]]:
        """The parts that `pack` was given. Raises ProtocolError, and what msgspec does for values that are none."""
        if not packed:
            return [()] * times_ns.size
        groups = unpack_counts(packed[_ROWS], times_ns.size)
        columns = [self._column(name, packed, groups, times_ns) for name in self._fields]
        structs = list(map(self._make, *columns))
        starts = groups.starts.tolist()
        return [tuple(structs[begin:end]) for begin, end in pairwise(starts)]

    def _column(self, name: str, packed: Mapping[str, bytes], groups: Groups, times_ns: Ints) -> list[Any]:
        count = groups.num_rows
        if name not in packed:
            if self._fields[name].default is msgspec.NODEFAULT:
                raise ProtocolError(f"a bundle without its column {name}")
            return [self._fields[name].default] * count
        if name not in self._values:
            is_time = name.endswith(_TIME)
            told = unpack(packed[name], count) + times_ns[groups.of] if is_time else unpack_deltas(packed[name], count)
            whole: list[int] = told.tolist()
            return whole
        values = self._values[name].decode(packed[name])
        which = unpack_deltas(packed[name + _WHICH], count)
        if np.any((which < 0) | (which >= len(values))):
            raise ProtocolError(f"a bundle with a {name} that is told nowhere")
        return [values[place] for place in which.tolist()]


def _pack_values(name: str, values: Sequence[object]) -> dict[str, bytes]:
    encoded = [msgspec.msgpack.encode(value) for value in values]
    places = {data: place for place, data in enumerate(dict.fromkeys(encoded))}
    distinct = list(dict(zip(encoded, values, strict=True)).values())
    which = np.array([places[data] for data in encoded], np.int64)
    return {name: msgspec.msgpack.encode(distinct), name + _WHICH: pack_deltas(which)}
