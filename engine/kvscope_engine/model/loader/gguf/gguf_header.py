"""Parser of GGUF headers, in which every size is checked against the file's size before use.

A file that passes can be read by a loader that does not validate its input. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvscope_engine.model.loader.gguf.split_files import parts_of
from kvscope_telemetry.errors import BadInput

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_LIST: Final = 1024
"""Maximum length of lists that are read, enough for one value per layer."""
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING: Final = 8
_ARRAY: Final = 9
_MIN_STRING_BYTES: Final = 8
_MIN_TENSOR_BYTES: Final = 32
_MIN_FIELD_BYTES: Final = 13
_SIZE_FIELDS: Final = (
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a tensor: file, offset and size in bytes. `type_number` is ggml's type."""

    type_number: int
    start: int
    num_bytes: int
    file: Path = Path()


@dataclass(slots=True)
class GgufHeader:
    """Scalar fields by key, and the shape and location of each tensor by name.

    `lists` has the short numeric arrays, `arrays` the keys of all other arrays.
    """

    fields: dict[str, Scalar] = field(default_factory=dict)
    lists: dict[str, tuple[Scalar, ...]] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    locations: dict[str, TensorLocation] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))


def check_gguf(path: Path) -> GgufHeader:
    """Read the header of the GGUF file, and of all parts if `path` is the first part of a split model.

    Raises BadInput if it is not a GGUF file, is truncated, or has impossible sizes.
    """
    header, *others = (_header_of(part) for part in parts_of(path))
    try:
        _merge_parts(header, others)
        _check_sizes(header)
    except BadInput as error:
        raise BadInput(f"{path} is not accepted: {error}") from error
    return header


def _header_of(path: Path) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data), path)
    except BadInput as error:
        raise BadInput(f"{path} is not accepted: {error}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise BadInput(f"{path} is not accepted: it is empty") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


def _merge_parts(header: GgufHeader, others: list[GgufHeader]) -> None:
    count = header.fields.get("split.count", 0)
    if count not in (0, 1, 1 + len(others)):
        raise BadInput(f"it is one of {count!r:.40} parts, which must be beside it, named as llama-gguf-split does")
    for other in others:
        duplicate = next(iter(header.shapes.keys() & other.shapes.keys()), None)
        if duplicate is not None:
            raise BadInput(f"tensor {duplicate!r:.60} occurs twice")
        header.shapes |= other.shapes
        header.locations |= other.locations


class _Reader:
    """Reads little-endian values sequentially. Raises BadInput instead of reading beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    @property
    def num_left(self) -> int:
        return len(self.data) - self.offset

    def skip(self, count: int) -> int:
        """Skip `count` bytes and return the offset at which they start."""
        start = self.offset
        if count > self.num_left:
            raise BadInput(f"it is truncated: {count} bytes are needed at byte {start}, {self.num_left} are left")
        self.offset = start + count
        return start

    def scalar(self, code: str) -> int | float | bool:
        start = self.skip(struct.calcsize(f"<{code}"))
        value: int | float | bool = struct.unpack_from(f"<{code}", self.data, start)[0]
        return value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def count(self, min_bytes: int, items: str) -> int:
        """Read an item count. Raises BadInput if the rest of the file is too short for that many items of at
        least `min_bytes` bytes each.
        """
        number = self.integer("Q")
        if number * min_bytes > self.num_left:
            raise BadInput(f"it claims {number} {items}, more than its {len(self.data)} bytes can hold")
        return number

    def skip_strings(self, number: int) -> None:
        """Skip `number` strings. The loop calls no other method, for speed: a vocabulary has hundreds of
        thousands of strings.
        """
        end, offset, unpack_length = len(self.data), self.offset, struct.Struct("<Q").unpack_from
        for _ in range(number):
            next_offset = offset + _MIN_STRING_BYTES
            next_offset += unpack_length(self.data, offset)[0] if next_offset <= end else 0
            if next_offset > end:
                self.offset = offset
                self.skip(self.integer("Q"))  # raises the error
            offset = next_offset
        self.offset = offset

    def string(self) -> str:
        length = self.integer("Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", "replace")


def _parse(reader: _Reader, path: Path) -> GgufHeader:
    if reader.data[:4] != MAGIC:
        raise BadInput("it is not a GGUF file")
    reader.skip(4)
    version = reader.integer("I")
    if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
        raise BadInput("it is a big-endian GGUF file: only little-endian ones are read")
    if version not in VERSIONS:
        raise BadInput(f"GGUF version {version} is unknown: {VERSIONS[0]} and {VERSIONS[1]}, little-endian, are read")
    num_tensors = reader.count(_MIN_TENSOR_BYTES, "tensors")
    num_fields = reader.count(_MIN_FIELD_BYTES, "fields")
    header = GgufHeader()
    for _ in range(num_fields):
        key = reader.string()
        value = _value(reader, reader.integer("I"), key)
        if isinstance(value, tuple):
            header.lists[key] = value
        elif value is not None:
            header.fields[key] = value
        else:
            header.arrays.append(key)
    _read_tensors(reader, num_tensors, header, path)
    return header


def _value(reader: _Reader, kind: int, key: str) -> Scalar | tuple[Scalar, ...] | None:
    if kind == _STRING:
        return reader.string()
    if kind == _ARRAY:
        return _array(reader, key)
    if kind not in _SCALARS:
        raise BadInput(f"field {key!r:.60} has unknown type {kind}")
    return reader.scalar(_SCALARS[kind])


def _array(reader: _Reader, key: str) -> tuple[Scalar, ...] | None:
    """Return the numbers of a short array; None for other arrays, which are skipped."""
    kind = reader.integer("I")
    if kind == _STRING:
        reader.skip_strings(reader.count(_MIN_STRING_BYTES, f"strings in {key!r:.60}"))
        return None
    if kind not in _SCALARS:
        raise BadInput(f"array {key!r:.60} has items of unknown type {kind}")
    code = _SCALARS[kind]
    size = struct.calcsize(f"<{code}")
    count = reader.count(size, f"numbers in {key!r:.60}")
    if count <= MAX_LIST:
        return tuple(reader.scalar(code) for _ in range(count))
    reader.skip(count * size)
    return None


def _read_tensors(reader: _Reader, num_tensors: int, header: GgufHeader, path: Path) -> None:
    locations: list[tuple[str, int, int]] = []
    type_numbers: list[int] = []
    for _ in range(num_tensors):
        name = reader.string()
        if name in header.shapes:
            raise BadInput(f"tensor {name!r:.60} occurs twice")
        shape = _shape(reader, name)
        type_number = reader.integer("I")
        locations.append((name, reader.integer("Q"), _num_bytes(name, shape, type_number)))
        header.shapes[name] = shape
        type_numbers.append(type_number)
    data_start = _check_locations(locations, header.fields.get("general.alignment", 32), reader)
    for type_number, (name, start, num_bytes) in zip(type_numbers, locations, strict=True):
        header.locations[name] = TensorLocation(type_number, data_start + start, num_bytes, path)


def _shape(reader: _Reader, name: str) -> tuple[int, ...]:
    num_dimensions = reader.integer("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise BadInput(f"tensor {name!r:.60} has {num_dimensions} dimensions: 1 to {MAX_DIMENSIONS} are accepted")
    shape = tuple(reader.integer("Q") for _ in range(num_dimensions))
    if min(shape) < 1:
        raise BadInput(f"tensor {name!r:.60} has dimensions {shape}")
    return shape


def _num_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise BadInput(f"tensor {name!r:.60} has unknown type {kind}") from error
    if shape[0] % per_block:
        raise BadInput(f"tensor {name!r:.60} has rows of {shape[0]}, no multiple of its blocks of {per_block}")
    return math.prod(shape) // per_block * block_bytes


def _check_locations(locations: list[tuple[str, int, int]], alignment: Scalar, reader: _Reader) -> int:
    """Return the offset of the file's data section. Raises BadInput if a tensor does not lie within that
    section, or the alignment is invalid.
    """
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise BadInput(f"its alignment is {alignment!r:.40}: a power of two is needed")
    data_start = -(-reader.offset // alignment) * alignment
    data_bytes = len(reader.data) - data_start
    for name, start, num_bytes in locations:
        if start % alignment or start + num_bytes > data_bytes:
            raise BadInput(
                f"it is cut short or damaged: tensor {name!r:.60} is {num_bytes} bytes at {start}"
                f" of {max(0, data_bytes)}"
            )
    total = sum(num_bytes for _, _, num_bytes in locations)
    if total > data_bytes:
        raise BadInput(f"its tensors take {total} bytes, more than the {data_bytes} it has for them")
    return data_start


def _check_sizes(header: GgufHeader) -> None:
    """Raise BadInput if a size from which a loader creates tensors is larger than the file's tensors allow."""
    if not header.architecture or not header.shapes:
        raise BadInput("it contains no model")
    largest = max(max(shape) for shape in header.shapes.values())
    limits = dict.fromkeys(_SIZE_FIELDS, largest) | {"block_count": len(header.shapes)}
    for name, limit in limits.items():
        key = f"{header.architecture}.{name}"
        for value in header.lists.get(key, (header.fields.get(key, 1),)):
            if not isinstance(value, int) or not 0 < value <= limit:
                raise BadInput(f"{key} is {value!r:.40}, its tensors allow 1 to {limit}")
