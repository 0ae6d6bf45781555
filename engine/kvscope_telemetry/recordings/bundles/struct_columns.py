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
from kvscope_telemetry.recordings.bundles.groups import Groups, accepted, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.integers import (
    Ints,
    pack,
    pack_deltas,
    starts_of,
    unpack_deltas_each,
    unpack_each,
)

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_ROWS: Final = "rows"
_WHICH: Final = "_which"
_TIME: Final = "_ns"
_NO_ROWS: Final = b"\0"
"""No numbers, or any that are 0."""


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
        structs = self._made([packed], [groups.num_rows], times_ns[groups.of])
        return [structs[begin:end] for begin, end in pairwise(groups.starts.tolist())]

    def unpack_each(self, packed: Sequence[Mapping[str, bytes]], times_ns: Ints, begin: str) -> tuple[_Struct, ...]:
        """The parts of several that `pack` was given with one time each, one after another; the names of its columns
        begin with `begin`. Raises the same."""
        told = [each.get(begin + _ROWS, _NO_ROWS) for each in packed]
        counts = accepted(unpack_each(told, [1] * len(told))).counts
        return self._made(packed, counts.tolist(), np.repeat(times_ns, counts), begin)

    def _made(
        self, packed: Sequence[Mapping[str, bytes]], counts: Sequence[int], times_ns: Ints, begin: str = ""
    ) -> tuple[_Struct, ...]:
        """Of so many rows each, one after another, of frames at `times_ns`."""
        columns = [self._column(name, begin, packed, counts, times_ns) for name in self._fields]
        return tuple(map(self._make, *columns))

    def _column(
        self, name: str, begin: str, packed: Sequence[Mapping[str, bytes]], counts: Sequence[int], times_ns: Ints
    ) -> list[Any]:
        where = begin + name
        are_told = [where in each or begin + _ROWS not in each for each in packed]
        default = None if all(are_told) else self._default(name)
        if not any(where in each for each in packed):
            return [default] * sum(counts)
        if name in self._values:
            values = [self._values[name].decode(each[where]) if where in each else [default] for each in packed]
            told_which = [each[where + _WHICH] if where in each else _NO_ROWS for each in packed]
            which = unpack_deltas_each(told_which, counts)
            return _chosen(name, values, which, counts)
        parts = [each.get(where, _NO_ROWS) for each in packed]
        told = unpack_each(parts, counts) + times_ns if name.endswith(_TIME) else unpack_deltas_each(parts, counts)
        if default is not None:
            told[np.repeat(~np.array(are_told), counts)] = default
        whole: list[int] = told.tolist()
        return whole

    def _default(self, name: str) -> Any:
        default = self._fields[name].default
        if default is msgspec.NODEFAULT:
            raise ProtocolError(f"a bundle without its column {name}")
        return default


def _chosen(name: str, values: Sequence[Sequence[object]], which: Ints, counts: Sequence[int]) -> list[Any]:
    """Of each part, which has so many rows, the value that each row means."""
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    if np.any((which < 0) | (which >= np.repeat(sizes, counts))):
        raise ProtocolError(f"a bundle with a {name} that is told nowhere")
    among, begins = list(chain.from_iterable(values)), starts_of(sizes)[:-1]
    return [among[place] for place in (which + np.repeat(begins, counts)).tolist()]


def _pack_values(name: str, values: Sequence[object]) -> dict[str, bytes]:
    encoded = [msgspec.msgpack.encode(value) for value in values]
    places = {data: place for place, data in enumerate(dict.fromkeys(encoded))}
    distinct = list(dict(zip(encoded, values, strict=True)).values())
    which = np.array([places[data] for data in encoded], np.int64)
    return {name: msgspec.msgpack.encode(distinct), name + _WHICH: pack_deltas(which)}
