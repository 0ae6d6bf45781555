"""Columnar encoding of messages of one type. The columns follow from the struct definitions.

Each number of the structs becomes a column over all messages. Columns are delta-encoded, and their bytes are grouped by
significance (byte shuffle). All columns together are one zstd frame. docs/recording-format.md specifies the encoding
for other languages. At 200 steps/s with 32 requests, frames take 1.9 MB per minute, compared with 3.9 MB in msgpack and
zstd. Must not depend on files or on particular messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import structs

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import U4, U8, Packing, packing_of

LEVEL: Final = 15
"""zstd level. Output is a fifth smaller than at the default of 3, for 6 ms per second of recording at 200 steps/s.
Level 11 would take half the time and produce 3 % more bytes.
"""
LARGE_LEVEL: Final = 3
LARGE_BYTES: Final = 4 << 20
"""Size above which `LARGE_LEVEL` is used instead of `LEVEL`. Messages of this size are keyframes of very many
blocks, and most of their bytes are random hashes, which no level compresses.
"""
MAX_RECORDS: Final = 1 << 16
MAX_PACKED_BYTES: Final = 256 << 20
"""Maximum uncompressed size of the columns of one message. Larger messages are refused before they are
decompressed, and before memory for omitted columns, whose numbers are all 0, is allocated.
"""
_I8: Final = np.dtype("<i8")
_BYTE: Final = np.dtype("u1")
_HASHES: Final = "hashes"
_OBJECTS: Final = "msgpack"
_RAW_PREFIX: Final = "="
_ZERO: Final = (_I8.str, bytes(_I8.itemsize))

_Record = TypeVar("_Record", bound=msgspec.Struct)
Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


class _Stored(msgspec.Struct, frozen=True):
    kind: str
    num_records: int
    columns: dict[str, tuple[str, bytes]]
    """Type and data of each column by name. The type is "msgpack" or numpy's dtype string, with the prefix "=" if the
    numbers are not delta-encoded.
    """


class _Field(NamedTuple):
    name: str
    packing: Packing | None
    table: type[msgspec.Struct] | None
    """Struct type of the field if all fields of that struct are numeric, so that each is stored as a column, too."""
    is_number: bool
    info: structs.FieldInfo


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Stored)


@contextmanager
def readable(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, ValueError, OverflowError, IndexError, RecursionError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ProtocolError(f"{what} cannot be read: {reason}") from None


def pack(records: Sequence[msgspec.Struct], extra: Mapping[str, Sequence[int]] | None = None) -> bytes:
    """Encode `records`, all of one type, as columns.

    Args:
        records: At least one message; all have the same struct type.
        extra: Additional columns: name -> one number per record.

    Raises:
        ValueError: Columns of one record have inconsistent lengths.
        OverflowError: A number does not fit into 64 bits.
    """
    packer = _Packer()
    packer.add(type(records[0]), records, "")
    for name, numbers in (extra or {}).items():
        packer.add_column(name, np.array(numbers, _I8))
    packer.add_hashes()
    stored = _Stored(type(records[0]).__name__, len(records), packer.columns)
    data = _ENCODER.encode(stored)
    return zstandard.ZstdCompressor(level=LEVEL if len(data) <= LARGE_BYTES else LARGE_LEVEL).compress(data)


class _Packer:
    def __init__(self) -> None:
        self.columns: dict[str, tuple[str, bytes]] = {}
        self._hash_columns: list[tuple[str, Numbers]] = []
        self._outer_values: Mapping[str, Sequence[Any]] = {}

    def add(self, kind: type[msgspec.Struct], records: Sequence[Any], path: str) -> None:
        fields = _fields(kind)
        values = dict(
            zip([field.name for field in fields], zip(*map(structs.astuple, records), strict=True), strict=True)
        )
        self._outer_values = self._outer_values or values
        for field in fields:
            name, values_of_field = path + field.name, values[field.name]
            if field.is_number:
                self.add_column(name, np.array(values_of_field, _I8))
            elif field.table is not None:
                self.add(field.table, values_of_field, name + ".")
            elif field.packing is None:
                self._add_objects(name, values_of_field, field)
            elif not field.packing.is_row:
                numbers, counts = _concatenated(values_of_field, field.packing.dtype)
                self.add_column(name + "#", counts.astype(U4))
                self.add_column(name, numbers)
        rows = _rows_of(kind)
        if rows:
            self._add_rows(path, {name: (packing, values[name]) for name, packing in rows.items()})

    def _add_rows(self, path: str, rows: Mapping[str, tuple[Any, Sequence[bytes]]]) -> None:
        concatenated = {name: _concatenated(objects, packing.dtype) for name, (packing, objects) in rows.items()}
        key = next(name for name, (packing, _) in rows.items() if packing.is_key)
        counts = next(concatenated[name][1] for name, (packing, _) in rows.items() if not packing.is_key)
        self.add_column(path.rstrip(".") + "#", counts.astype(U4))
        order: Numbers | slice | None = None
        if concatenated[key][0].size:
            _check_counts(concatenated[key][1], counts)
            order = _sort_order(concatenated[key][0])
            self.add_column(path + key, concatenated[key][0], always=True)
        order = slice(None) if order is None else order
        for name, (packing, _) in rows.items():
            numbers, own_counts = concatenated[name]
            if packing.is_key:
                continue
            if packing.is_optional and numbers.size < counts.sum():
                has_number = np.repeat(own_counts > 0, counts)
                if packing.rows_with:
                    has_number &= concatenated[packing.rows_with][0] != 0
                dense = np.zeros(len(has_number), packing.dtype)
                dense[has_number] = numbers
                numbers, own_counts = dense, counts
            _check_counts(own_counts, counts)
            if packing.counts_back_from:
                numbers = _repeated(self._outer_values[packing.counts_back_from], counts, packing.dtype) - numbers
            if packing.is_hash:
                self._hash_columns.append((path + name, numbers[order]))
            else:
                self.add_column(path + name, numbers[order])

    def add_column(self, name: str, numbers: Numbers, *, always: bool = False, is_raw: bool = False) -> None:
        if always or numbers.any():
            differences = np.array(numbers)
            if not is_raw:
                differences[1:] -= numbers[:-1]
            shuffled = differences.view(_BYTE).reshape(-1, differences.dtype.itemsize).T
            self.columns[name] = (is_raw * _RAW_PREFIX + numbers.dtype.str, shuffled.tobytes())

    def add_hashes(self) -> None:
        """Store each distinct hash once, in order of first occurrence, and references to them in the columns.

        A reference is 0 for no hash, 1 for a hash that occurs for the first time, 2 for the most recently introduced
        hash, 3 for the one introduced before that, and so on.
        """
        if not self._hash_columns:
            return
        all_hashes = np.concatenate([np.zeros(1, U8), *(hashes for _, hashes in self._hash_columns)])
        hashes_found, first_index, inverse = np.unique(all_hashes, return_index=True, return_inverse=True)
        by_occurrence = np.argsort(first_index)
        numbers = np.empty(len(hashes_found), np.int64)
        numbers[by_occurrence] = np.arange(len(hashes_found))
        numbers = numbers[inverse]
        self.add_column(_HASHES, hashes_found[by_occurrence][1:], is_raw=True)
        newest = np.maximum.accumulate(numbers)[:-1]
        references = np.where(numbers[1:] == 0, 0, newest + 2 - numbers[1:]).astype(U4)
        offset = 0
        for name, hashes in self._hash_columns:
            self.add_column(name, references[offset : offset + len(hashes)], is_raw=True)
            offset += len(hashes)

    def _add_objects(self, name: str, objects: Sequence[Any], field: _Field) -> None:
        default = field.info.default
        if not all(each is default or each == default for each in objects):
            self.columns[name] = (_OBJECTS, _ENCODER.encode(objects))


class Columns:
    """Decoder of `pack`'s output. Columns are unpacked on demand.

    The constructor and every method raise ProtocolError for inconsistent data and for data that claims to exceed the
    size limits.
    """

    def __init__(self, data: bytes) -> None:
        with readable("a message of columns"):
            stored = _DECODER.decode(_inflated(data))
        if not 0 < stored.num_records <= MAX_RECORDS:
            raise ProtocolError(f"{stored.num_records} messages in columns: 1 to {MAX_RECORDS} are accepted")
        self.kind = stored.kind
        self.num_records = stored.num_records
        self._columns = stored.columns
        self._tables: set[str] | None = None
        self._hashes: Numbers | None = None
        self._hash_counts = np.array([_num_hashes(stored.columns)])  # per packed message
        self._hashes_seen = np.zeros(1, np.int64)  # per packed message: hashes referred to by the columns so far
        self._rows_by_path: dict[str, tuple[dict[str, Numbers], Ints]] = {}
        self._remaining_bytes = MAX_PACKED_BYTES

    def numbers(self, name: str) -> Ints:
        """Return the column `name` with one number per message, shape (num_records,)."""
        return self._column(name, _I8, np.ones(self.num_records, np.int64))

    def number(self, name: str) -> int:
        """Return the number of the only message. Fast path for `num_records == 1`."""
        stored_dtype, data = self._columns.get(name, _ZERO)
        if stored_dtype != _I8.str or len(data) != _I8.itemsize:
            raise ProtocolError(f"column {name:.40} is no number")
        return int.from_bytes(data, "little", signed=True)

    def _ints(self, name: str) -> list[int]:
        return [self.number(name)] if self.num_records == 1 else self.numbers(name).tolist()

    def packed(self, name: str, dtype: np.dtype[Any]) -> tuple[Numbers, Ints]:
        """Return the numbers of a packed field that is not a struct of columns: those of all messages
        concatenated, and the count per message.
        """
        counts = self.counts(name)
        return self._column(name, dtype, counts), counts

    def counts(self, name: str) -> Ints:
        """Return, for each message, the number of rows of field `name` if it is a struct of columns, or the
        number of its packed numbers.
        """
        return self._column(name + "#", U4, np.ones(self.num_records, np.int64)).astype(np.int64)

    def keys(self, path: str, key: str) -> tuple[Numbers, Ints]:
        """Return the column `key` (block ids or request numbers) of the struct of columns at `path`, and the
        number of its rows per message.
        """
        counts, name = self.counts(path), f"{path}.{key}"
        return self._column(name, U4, counts if name in self._columns else np.zeros_like(counts)), counts

    def objects(self, kind: type[msgspec.Struct], name: str) -> Sequence[Any]:
        return self._objects(name, next(field for field in _fields(kind) if field.name == name))

    def records(self, kind: type[_Record], indices: Sequence[int] | None = None) -> list[_Record]:
        """Return all packed messages as structs, or only those at `indices`."""
        parts = self._struct(kind, "", indices)
        names = list(parts)
        with readable("a message of columns"):
            return [kind(**dict(zip(names, values, strict=True))) for values in zip(*parts.values(), strict=True)]

    def table(self, kind: type[_Record], path: str, num_records: int | None = None) -> _Record:
        """Return one struct with the rows of all messages, or of the first `num_records`; other fields have the last
        message's value.
        """
        indices = None if num_records is None else range(num_records)
        return kind(
            **{name: values[-1] for name, values in self._struct(kind, path + ".", indices, is_merged=True).items()}
        )

    def _struct(
        self, kind: type[msgspec.Struct], path: str, indices: Sequence[int] | None, *, is_merged: bool = False
    ) -> dict[str, Sequence[Any]]:
        fields = _fields(kind)
        fields_by_name: dict[str, Sequence[Any]] = {}
        rows = _rows_of(kind)
        for field in fields:
            name = path + field.name
            if field.is_number:
                fields_by_name[field.name] = _selected(self._ints(name), indices)
            elif field.table is not None and self._is_absent(field):
                fields_by_name[field.name] = [field.info.default] * (
                    self.num_records if indices is None else len(indices)
                )
            elif field.table is not None:
                parts = self._struct(field.table, name + ".", indices)
                fields_by_name[field.name] = [field.table(*each) for each in zip(*parts.values(), strict=True)]
            elif field.packing is None:
                fields_by_name[field.name] = _selected(self._objects(name, field), indices)
            elif field.name in rows:
                fields_by_name[field.name] = ()  # set below; keeps the order of the fields
            else:
                fields_by_name[field.name] = _split_bytes(
                    *self.packed(name, field.packing.dtype), indices, is_merged=is_merged
                )
        if rows:
            fields_by_name |= self._rows(path, rows, indices, is_merged=is_merged)
        return fields_by_name

    def _rows(
        self, path: str, rows: Mapping[str, Packing], indices: Sequence[int] | None, *, is_merged: bool
    ) -> dict[str, Sequence[bytes]]:
        key = next(name for name, packing in rows.items() if packing.is_key)
        unpacked, counts = self._unpacked_rows(path, rows, key)
        if is_merged and indices is not None:
            num_rows = int(counts[: len(indices)].sum())
            unpacked = {name: numbers[:num_rows] for name, numbers in unpacked.items()}
        fields_by_name: dict[str, Sequence[bytes]] = {}
        for name, packing in rows.items():
            numbers, own_counts = unpacked[name], counts
            if packing.is_optional and path + name not in self._columns:
                numbers = numbers[:0]
            elif packing.is_optional:
                numbers, own_counts = _without_zeros(
                    numbers, unpacked.get(packing.rows_with), counts, is_merged=is_merged
                )
            fields_by_name[name] = _split_bytes(
                numbers, own_counts if numbers.size else np.zeros_like(own_counts), indices, is_merged=is_merged
            )
        return fields_by_name

    def _unpacked_rows(self, path: str, rows: Mapping[str, Packing], key: str) -> tuple[dict[str, Numbers], Ints]:
        """Return the unpacked columns of the struct at `path`, with rows in message order, and the number of
        rows per message. Cached.
        """
        if path in self._rows_by_path:
            return self._rows_by_path[path]
        ids, counts = self.keys(path.rstrip("."), key)
        order = self._message_order(ids, counts) if ids.size else None
        unpacked = {key: ids}
        for name, packing in rows.items():
            if packing.is_optional and path + name not in self._columns:
                unpacked[name] = np.zeros(0, packing.dtype)
            elif not packing.is_key:
                unpacked[name] = self._row_numbers(path + name, packing, counts, order)
        if self.num_records > 1:  # a single message is only unpacked once
            self._rows_by_path[path] = unpacked, counts
        return unpacked, counts

    def _row_numbers(self, name: str, packing: Packing, counts: Ints, order: Numbers | None) -> Numbers:
        numbers = self._hash_numbers(name, counts) if packing.is_hash else self._column(name, packing.dtype, counts)
        if order is not None:
            in_order = np.empty_like(numbers)
            in_order[order] = numbers
            numbers = in_order
        if packing.counts_back_from:
            numbers = _repeated(self.numbers(packing.counts_back_from), counts, packing.dtype) - numbers
        return numbers

    def _message_order(self, keys: Numbers, counts: Ints) -> Numbers | None:
        """Return the indices that bring rows stored in order of their keys into message order; None if both
        orders are the same.
        """
        return _sort_order(keys)

    def _is_absent(self, field: _Field) -> bool:
        if self._tables is None:
            self._tables = {name.replace("#", ".").partition(".")[0] for name in self._columns}
        return field.name not in self._tables and field.info.default is not msgspec.NODEFAULT

    def _hash_numbers(self, name: str, counts: Ints) -> Numbers:
        """Resolve a column of references to hashes. Must be called for the columns in the order of the struct,
        because a column's references continue the numbering of the previous column.
        """
        references = self._column(name, U4, counts)
        if self._hashes is None:
            self._hashes = np.concatenate([np.zeros(1, U8), self._column(_HASHES, U8, self._hash_counts)])
        is_new, counts = references == 1, self._rows_per_message(counts)
        total = np.cumsum(is_new)
        num_before, num_until = np.concatenate(([0], total))[[np.cumsum(counts) - counts, np.cumsum(counts)]]
        first = np.cumsum(self._hash_counts) - self._hash_counts + self._hashes_seen - num_before + 2
        hash_indices = total - is_new - references + np.repeat(first, counts)
        hash_indices[references == 0] = 0
        self._hashes_seen += num_until - num_before
        if (self._hashes_seen > self._hash_counts).any() or hash_indices.min(initial=0) < 0:
            raise ProtocolError(f"column {name:.40} refers to hashes that are not there")
        resolved: Numbers = self._hashes[hash_indices]
        return resolved

    def _rows_per_message(self, counts: Ints) -> Ints:
        """Return the number of rows per packed message. `counts` has the number of rows per record."""
        return np.array([counts.sum()])

    def _objects(self, name: str, field: _Field) -> Sequence[Any]:
        if name not in self._columns:
            if field.info.default is msgspec.NODEFAULT:
                raise ProtocolError(f"a message of columns without {name:.40}")
            return [field.info.default] * self.num_records
        with readable(f"column {name:.40}"):
            values: Sequence[Any] = _objects_decoder(field.info.type).decode(self._columns[name][1])
        if len(values) != self.num_records:
            raise ProtocolError(f"column {name:.40} has {len(values)} values for {self.num_records} messages")
        return values

    def _column(self, name: str, dtype: np.dtype[Any], counts: Ints) -> Numbers:
        count = self._charge(counts, dtype)
        if name not in self._columns:
            return np.zeros(count, dtype)
        numbers = _unshuffled(_checked(name, *self._columns[name], dtype, count), dtype)
        is_difference = self._columns[name][0][0] != _RAW_PREFIX
        return numbers.cumsum(dtype=dtype, out=numbers) if is_difference else numbers

    def _charge(self, counts: Ints, dtype: np.dtype[Any]) -> int:
        count = int(counts.sum())
        self._remaining_bytes -= count * dtype.itemsize
        if self._remaining_bytes < 0:
            raise ProtocolError(f"columns of more than {MAX_PACKED_BYTES >> 20} MiB in one message")
        return count


def _checked(name: str, stored_dtype: str, data: bytes, dtype: np.dtype[Any], count: int) -> bytes:
    """Return `data` if it has the type and length of `count` numbers, otherwise raise ProtocolError."""
    if stored_dtype not in (dtype.str, _RAW_PREFIX + dtype.str) or len(data) != count * dtype.itemsize:
        raise ProtocolError(
            f"column {name:.40} has {len(data)} bytes of {stored_dtype:.10}, not {count} of {dtype.str}"
        )
    return data


def _unshuffled(data: bytes, dtype: np.dtype[Any]) -> Numbers:
    """Undo the byte shuffle.

    Copies one byte plane after another: numpy takes three times as long to transpose the whole array.
    """
    planes = np.frombuffer(data, _BYTE).reshape(dtype.itemsize, -1)
    numbers = np.empty(planes.shape[1], dtype)
    for target, plane in zip(numbers.view(_BYTE).reshape(-1, dtype.itemsize).T, planes, strict=True):
        target[:] = plane
    return numbers


class MergedColumns(Columns):
    """Decodes several single-record messages of columns as one message with that many records.

    Unpacking many small messages together is faster. The rows of each message must be sorted by key.
    """

    def __init__(self, parts: Sequence[Columns]) -> None:
        assert parts, "there are some"
        assert all(part.num_records == 1 for part in parts), "each has one record"
        self.kind, self.num_records = parts[0].kind, len(parts)
        self._parts = [part._columns for part in parts]
        self._columns = {name: column for columns in self._parts for name, column in columns.items()}
        self._tables, self._hashes, self._remaining_bytes = None, None, MAX_PACKED_BYTES
        self._rows_by_path = {}
        self._hash_counts = np.array([_num_hashes(columns) for columns in self._parts])
        self._hashes_seen = np.zeros(len(parts), np.int64)

    def _message_order(self, keys: Numbers, counts: Ints) -> Numbers | None:
        descents = np.flatnonzero(keys[1:] < keys[:-1]) + 1
        if not set(descents.tolist()) <= set(np.cumsum(counts).tolist()):
            raise ProtocolError("rows of a message among several that do not ascend")
        return None

    def _rows_per_message(self, counts: Ints) -> Ints:
        return counts

    def _objects(self, name: str, field: _Field) -> Sequence[Any]:
        decode = _objects_decoder(field.info.type).decode
        values: list[Any] = []
        with readable(f"column {name:.40}"):
            for columns in self._parts:
                values += decode(columns[name][1]) if name in columns else [field.info.default]
        if len(values) != self.num_records:
            raise ProtocolError(f"column {name:.40} has {len(values)} values for {self.num_records} messages")
        return values

    def _column(self, name: str, dtype: np.dtype[Any], counts: Ints) -> Numbers:
        total = self._charge(counts, dtype)
        if name not in self._columns:
            return np.zeros(total, dtype)
        parts = [
            (count, _checked(name, *columns[name], dtype, count) if name in columns else bytes(count * dtype.itemsize))
            for columns, count in zip(self._parts, counts.tolist(), strict=True)
        ]
        planes = [data[plane * count : (plane + 1) * count] for plane in range(dtype.itemsize) for count, data in parts]
        numbers = _unshuffled(b"".join(planes), dtype)
        if self._columns[name][0][0] != _RAW_PREFIX and total:
            starts = (np.cumsum(counts) - counts)[counts > 0]
            # The differences of each message start from 0.
            numbers[starts[1:]] -= np.add.reduceat(numbers, starts, dtype=dtype)[:-1]
            numbers.cumsum(dtype=dtype, out=numbers)
        return numbers


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[_Field, ...]:
    return tuple(_field(info) for info in structs.fields(kind))


@cache
def _rows_of(kind: type[msgspec.Struct]) -> Mapping[str, Packing]:
    return {f.name: f.packing for f in _fields(kind) if f.packing is not None and f.packing.is_row}


def _field(info: structs.FieldInfo) -> _Field:
    packing, kind = packing_of(info.type), info.type
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    table = kind if is_struct and all(f.is_number or f.packing is not None for f in _fields(kind)) else None
    return _Field(info.name, packing, table, kind is int, info)


@cache
def _objects_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(list[kind])


def _num_hashes(columns: Mapping[str, tuple[str, bytes]]) -> int:
    return len(columns.get(_HASHES, ("", b""))[1]) // U8.itemsize


def claimed_bytes(data: bytes) -> int:
    """Return the uncompressed size that a message of columns claims. Raises ProtocolError if it exceeds the limit."""
    try:
        claimed = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"columns cannot be read: {error}") from None
    if not 0 <= claimed <= MAX_PACKED_BYTES:
        raise ProtocolError(f"columns that claim {claimed} bytes: at most {MAX_PACKED_BYTES} are accepted")
    return claimed


def _inflated(data: bytes) -> bytes:
    claimed = claimed_bytes(data)
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=claimed)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ProtocolError(f"columns cannot be read: {error}") from None


def _sort_order(keys: Numbers) -> Numbers | None:
    """Return the indices that sort the rows by key; None if they are sorted."""
    return None if (keys[1:] >= keys[:-1]).all() else np.argsort(keys, kind="stable")


def _concatenated(parts: Sequence[bytes], dtype: np.dtype[Any]) -> tuple[Numbers, Ints]:
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    if (lengths % dtype.itemsize).any():
        raise ValueError(f"bytes that are no whole numbers of {dtype.itemsize}")
    return np.frombuffer(b"".join(parts), dtype), lengths // dtype.itemsize


def _check_counts(own_counts: Ints, counts: Ints) -> None:
    if not np.array_equal(own_counts, counts):
        raise ValueError("rows of unequal columns")


def _repeated(numbers: Sequence[int] | Ints, counts: Ints, dtype: np.dtype[Any]) -> Numbers:
    return np.repeat(np.array(numbers, _I8), counts).astype(dtype)


def _without_zeros(numbers: Numbers, marker: Numbers | None, counts: Ints, *, is_merged: bool) -> tuple[Numbers, Ints]:
    """Drop the zeros that stand for an absent number. Returns the remaining numbers and their count per message.

    `marker`, if given, is 0 in the rows without a number. In addition, a message whose numbers are all 0 has none.
    """
    has_number = np.ones(len(numbers), np.bool_) if marker is None else marker != 0
    if is_merged or len(counts) == 1:
        numbers = numbers[has_number] if numbers.any() else numbers[:0]
        return numbers, np.array([len(numbers)])
    bounds = np.concatenate(([0], np.cumsum(counts)))
    num_nonzero, own_counts = (
        np.diff(np.concatenate(([0], np.cumsum(mask)))[bounds]) for mask in (numbers != 0, has_number)
    )
    own_counts = np.where(num_nonzero > 0, own_counts, 0)
    return numbers[has_number & np.repeat(own_counts > 0, counts)], own_counts


def _split_bytes(numbers: Numbers, counts: Ints, indices: Sequence[int] | None, *, is_merged: bool) -> Sequence[bytes]:
    if is_merged and indices is not None:
        numbers = numbers[: int(counts[: len(indices)].sum())]
    data = numbers.tobytes()
    if is_merged or (len(counts) == 1 and indices is None):
        return [data]
    if not data:
        return [b""] * (len(counts) if indices is None else len(indices))
    ends = (np.cumsum(counts) * numbers.dtype.itemsize).tolist()
    starts = [0, *ends[:-1]]
    if indices is not None:
        return [data[starts[at] : ends[at]] for at in indices]
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def _selected(values: Sequence[Any], indices: Sequence[int] | None) -> Sequence[Any]:
    return values if indices is None else [values[at] for at in indices]
