"""A bundle: the frames of a second or less as one message of a recording, and back, byte for byte.

Columns of all frames lie side by side, each number told by what went before it in the bundle or by what other columns
of its frame foretell, so that what goes on as it did costs next to nothing. Hashes lie in lists before it
(`hash_lists`); nothing else that is before it in the file is needed. It is msgpack: a map of columns by number, in
earlier versions by name (`kvscope.Bundle`). Frames of which it could not give every byte back, such as those of a later
version, are refused, and belong in the file as they came. Knows no files. What is read is checked for what unpacking
needs; the frames as messages are checked where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import Counters, Event, Frame, RequestInfo, TelemetryMessage, Timings, Work
from kvscope_telemetry.recordings.bundles.block_columns import pack_blocks, speaks_of, unpack_blocks
from kvscope_telemetry.recordings.bundles.block_columns import unpack_ids as unpack_block_ids
from kvscope_telemetry.recordings.bundles.column_names import named, numbered
from kvscope_telemetry.recordings.bundles.groups import Groups, joined, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, readable, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.numbers import TABLES, of_requests, pack_table, unpack_table
from kvscope_telemetry.recordings.bundles.references import Known
from kvscope_telemetry.recordings.bundles.request_columns import (
    moves_others,
    pack_batches,
    pack_moves,
    pack_requests,
    pack_times,
    unpack_batches,
    unpack_moves,
    unpack_numbers,
    unpack_requests,
    unpack_times,
)
from kvscope_telemetry.recordings.bundles.struct_columns import StructColumns
from kvscope_telemetry.recordings.bundles.struct_makers import make_event, make_request_info

MAX_FRAMES: Final = 4096
MAX_BUNDLE_BYTES: Final = 16 << 20
"""Of one that is read; ours are of at most a MiB of frames."""

TimedFrame = tuple[int, Frame]
"""Log time in ns, and a frame."""
_HEAD: Final = "head"
_LATE: Final = "late_ns"
"""Of the log time after the frame's own."""
_PREFILLED: Final = "batch.num_prefill_tokens"
_DECODED: Final = "batch.num_decode_tokens"
_SUMS: Final = (_PREFILLED, _DECODED)
_NUMBERS: Final = tuple(name for table in TABLES.values() for name in table if name != _LATE)
_numbers_of: Final = attrgetter(*_NUMBERS)
_MAKE: Final[dict[str, Callable[..., Any]]] = {"timings": Timings, "counters": Counters, "work": Work}
_NEWER: Final = dict.fromkeys(
    (
        *("counters.draft_tokens", "counters.accepted_tokens"),
        *("counters.restored_tokens", "counters.recomputed_tokens"),
        *("requests.num_draft_tokens", "requests.num_accepted_tokens"),
        *(f"work.{name}" for name in Work.__struct_fields__),
    ),
    b"\0",
)
"""Columns that bundles of earlier versions are without: all 0. Those of numbers lie in tables now (`numbers`)."""
_MARKS: Final = ("blocks.full", "blocks.hash_list", "requests.block_size", "requests.ends_at_0")
"""Columns without which a bundle would be read as one of an earlier version."""
_OPTIONAL: Final = ("blocks", "requests", "batch", "timings", "counters", "moves")
"""Left out of a message where they are their defaults."""
_TIMES: Final = ("first_token_ns", "inter_token_ns")
_FIELDS: Final = Frame.__struct_fields__[4:]
"""Those of a frame after its head."""
_fields_of: Final = attrgetter(*_FIELDS)
_ABSENT: Final = dict(zip(_FIELDS, Frame.__struct_defaults__, strict=True))
_BITS: Final = (*_OPTIONAL, "parents", "work")
"""What each bit of `is_there` is about; more come at the end."""
_PARENTS: Final = 1 << _BITS.index("parents")


_TOLD: Final[dict[str, StructColumns[Any]]] = {
    "events": StructColumns(Event, make_event),
    "new_requests": StructColumns(RequestInfo, make_request_info),
}
"""What frames have a few of, or none."""


class _Bundle(msgspec.Struct, frozen=True, omit_defaults=True):
    num_frames: int
    epoch: int
    columns: dict[str | int, bytes]
    """By number; those of earlier versions by name."""
    events: tuple[tuple[Event, ...], ...] = ()
    """Those of a bundle of an earlier version, in which they are no columns; so are the next."""
    new_requests: tuple[tuple[RequestInfo, ...], ...] = ()


_FRAMES: Final = msgspec.msgpack.Decoder(Frame)
_BUNDLES: Final = msgspec.msgpack.Decoder(_Bundle)
_ENCODER: Final = msgspec.msgpack.Encoder()


def bundled_frame(data: bytes, read: TelemetryMessage | None = None) -> Frame | None:
    """The frame whose bytes these are, when a bundle gives them back as they are. `read`: what was read of them."""
    try:
        frame = _FRAMES.decode(data) if read is None else read
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return None
    return frame if type(frame) is Frame and _ENCODER.encode(frame) == data else None


def pack_bundle(timed: Sequence[TimedFrame], into: HashList) -> bytes:
    """Frames of one epoch that `bundled_frame` gave, with their log times; hashes are told in `into`. Raises ValueError
    or OverflowError for some that contradict themselves."""
    frames = [frame for _, frame in timed]
    parts = dict(zip(_FIELDS, zip(*map(_fields_of, frames), strict=True), strict=True))
    numbers = dict(zip(_NUMBERS, np.array(list(map(_numbers_of, frames)), np.int64).T, strict=True))
    numbers[_LATE] = np.array([at_ns for at_ns, _ in timed], np.int64) - numbers["time_ns"]
    blocks = Known(*joined([rows.ids for rows in parts["blocks"]], "<u4"))
    requests = Known(*joined([rows.number for rows in parts["requests"]], "<u4"))
    columns = {"is_there": pack(_which(parts)), "rows": pack_counts(blocks.groups)}
    batches, ran = pack_batches(parts["batch"], requests)
    columns |= _named("batch", batches)
    request_columns, changed = pack_requests(parts["requests"], requests, blocks, ran)
    columns |= _named("requests", request_columns)
    told = pack_blocks(parts["blocks"], numbers["step"], blocks, changed.takers, into, timed[0][0])
    columns |= _named("blocks", told)
    others = of_requests(numbers[_PREFILLED], numbers[_DECODED], ran, changed)
    columns |= {table: pack_table(table, [numbers[name] for name in TABLES[table]], others) for table in TABLES}
    columns |= _named("moves", pack_moves(parts["moves"], blocks))
    for name in _TIMES:
        columns[f"{name}_rows"], columns[name] = pack_times(parts[name])
    for name, of_structs in _TOLD.items():
        columns |= _named(name, of_structs.pack(parts[name], numbers["time_ns"]))
    return _ENCODER.encode(_Bundle(len(frames), frames[0].epoch, numbered(columns)))


def unpack_bundle(data: bytes, lists: HashesOf) -> list[TimedFrame]:
    """What `pack_bundle` was given; `lists` have the hashes. Raises ProtocolError."""
    with readable("a bundle"):
        return _unpacked(_decoded(data), lists)


def span_of_bundle(data: bytes) -> tuple[int, int]:
    """How many frames it has, and the latest log time of one. Raises ProtocolError."""
    with readable("a bundle"):
        bundle = _decoded(data)
        head = _head(named(bundle.columns), bundle.num_frames)
        return bundle.num_frames, int((head["time_ns"] + head[_LATE]).max())


def leap_past(data: bytes, block: int) -> tuple[int, Leap] | None:
    """A leap over the frames of a bundle that say nothing of `block`, and the log time of the last; None where they
    speak of it, or are not one after another. Nothing else of them is unpacked. Raises ProtocolError."""
    with readable("a bundle"):
        bundle = _decoded(data)
        columns, count = named(bundle.columns), bundle.num_frames
        groups = unpack_counts(columns["rows"], count)
        if speaks_of(_unnamed("blocks", columns), groups, block):
            return None
        if moves_others(_unnamed("moves", columns), count, block):
            return None
        return _bare_leap(bundle, _head(columns, count))


def leap_over(data: bytes, lists: HashesOf) -> tuple[int, Leap] | None:
    """A leap over all frames of a bundle, whose rows lie one after another in it, and the log time of the last; None
    where they are not one after another. `lists` have the hashes. Raises ProtocolError."""
    with readable("a bundle"):
        bundle = _decoded(data)
        columns = _NEWER | named(bundle.columns)
        head = _head(columns, bundle.num_frames)
        bare = _bare_leap(bundle, head)
        return None if bare is None else (bare[0], _filled(bare[1], bundle, columns, head, lists))


def _bare_leap(bundle: _Bundle, head: Mapping[str, Ints]) -> tuple[int, Leap] | None:
    """A leap over its frames that says nothing of them."""
    seq, step, time_ns = (head[name] for name in _NUMBERS[:3])
    if np.any(np.diff(seq) != 1):
        return None
    log_time_ns = head[_LATE][-1] + time_ns[-1]
    last_seq, last_step, last_ns = int(seq[-1]), int(step[-1]), int(time_ns[-1])
    since_seq = int(seq[0]) - 1
    leap = Leap(epoch=bundle.epoch, seq=last_seq, since_seq=since_seq, step=last_step, time_ns=last_ns)
    return int(log_time_ns), leap


def _filled(
    leap: Leap, bundle: _Bundle, columns: Mapping[str, bytes], head: Mapping[str, Ints], lists: HashesOf
) -> Leap:
    rows = _rows(bundle, columns, head, lists, together=True)
    counters = _table("counters", columns, bundle.num_frames, rows.others)
    return replace(
        leap,
        blocks=rows.parts["blocks"][0],
        requests=rows.parts["requests"][0],
        new_requests=tuple(chain.from_iterable(_told("new_requests", bundle, columns, head))),
        counters=Counters(*(int(counters[name][-1]) for name in TABLES["counters"])),
    )


def _decoded(data: bytes) -> _Bundle:
    if len(data) > MAX_BUNDLE_BYTES:
        raise ProtocolError(f"a bundle of {len(data)} bytes is refused: at most {MAX_BUNDLE_BYTES} are accepted")
    bundle = _BUNDLES.decode(data)
    if not 0 < bundle.num_frames <= MAX_FRAMES:
        raise ProtocolError(f"a bundle of {bundle.num_frames} frames: 1 to {MAX_FRAMES} are accepted")
    return bundle


def _unpacked(bundle: _Bundle, lists: HashesOf) -> list[TimedFrame]:
    columns = _NEWER | named(bundle.columns)
    head = _head(columns, bundle.num_frames)
    log_times = head["time_ns"] + head[_LATE]
    heads = zip(*(head[name].tolist() for name in _NUMBERS[:3]), strict=True)
    parts = zip(*_parts(bundle, columns, head, lists), strict=True)
    frames = (_frame(bundle.epoch, *head, *part) for head, part in zip(heads, parts, strict=True))
    return list(zip(log_times.tolist(), frames, strict=True))


def _head(columns: Mapping[str, bytes], count: int) -> dict[str, Ints]:
    """Of each frame when it was, and how many tokens ran in it."""
    if _HEAD in columns:
        missing = next((name for name in _MARKS if name not in columns), None)
        if missing is not None:
            raise KeyError(missing)
        return unpack_table(_HEAD, columns[_HEAD], count)
    head = {name: unpack_deltas(columns[name], count) for name in TABLES[_HEAD] if name != _LATE}
    return head | {_LATE: unpack_deltas(columns["log_time_ns"], count)}


def _parts(
    bundle: _Bundle, columns: Mapping[str, bytes], head: Mapping[str, Ints], lists: HashesOf
) -> list[Sequence[Any]]:
    """What each frame has besides its head, a list a field."""
    count = bundle.num_frames
    rows = _rows(bundle, columns, head, lists)
    parts = dict(rows.parts, moves=unpack_moves(_unnamed("moves", columns), count, rows.ids, rows.groups))
    for table, make in _MAKE.items():
        numbers = _table(table, columns, count, rows.others)
        parts[table] = [make(*each) for each in zip(*(numbers[name].tolist() for name in TABLES[table]), strict=True)]
    for bit, name in enumerate(_BITS):
        if name not in parts:
            continue
        absent = _ABSENT[name]
        is_there = (rows.there & (1 << bit)).tolist()
        parts[name] = [part if has else absent for part, has in zip(parts[name], is_there, strict=True)]
    for name in _TIMES:
        parts[name] = unpack_times((columns[f"{name}_rows"], columns[name]), count)
    for name in _TOLD:
        parts[name] = _told(name, bundle, columns, head)
    return [parts[name] for name in _FIELDS]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of blocks and of requests, and what is foretold by them."""

    there: Ints
    ids: Ints
    groups: Groups
    """Of the rows of blocks."""
    parts: Mapping[str, Sequence[Any]]
    """A list each of `blocks`, `requests` and `batch`."""
    others: Mapping[str, Ints]


def _rows(
    bundle: _Bundle, columns: Mapping[str, bytes], head: Mapping[str, Ints], lists: HashesOf, *, together: bool = False
) -> _Rows:
    """A frame each of blocks and requests, or of all frames `together`."""
    count = bundle.num_frames
    there = unpack(columns["is_there"], count)
    groups = unpack_counts(columns["rows"], count)
    of_blocks, told_requests = _unnamed("blocks", columns), _unnamed("requests", columns)
    ids = unpack_block_ids(of_blocks, groups)
    numbers, changed_groups = unpack_numbers(told_requests, count)
    sums = [head[name].tolist() for name in _SUMS]
    batches, ran = unpack_batches(_unnamed("batch", columns), count, numbers, changed_groups, sums)
    requests, changed = unpack_requests(told_requests, numbers, changed_groups, ids, groups, ran, together=together)
    has_parents = (there & _PARENTS).tolist()
    step, takers = head["step"], changed.takers
    blocks = unpack_blocks(of_blocks, step, groups, ids, takers, has_parents, lists, together=together)
    parts: dict[str, Sequence[Any]] = {"blocks": blocks, "requests": requests, "batch": batches}
    return _Rows(there, ids, groups, parts, of_requests(head[_PREFILLED], head[_DECODED], ran, changed))


def _told(
    name: str, bundle: _Bundle, columns: Mapping[str, bytes], head: Mapping[str, Ints]
) -> Sequence[tuple[Any, ...]]:
    """What each frame has of what frames have a few of."""
    told: Sequence[tuple[Any, ...]] = getattr(bundle, name)
    return told or _TOLD[name].unpack(_unnamed(name, columns), head["time_ns"])


def _table(table: str, columns: Mapping[str, bytes], count: int, others: Mapping[str, Ints]) -> dict[str, Ints]:
    if _HEAD in columns:
        return unpack_table(table, columns[table], count, others)
    return {name: unpack_deltas(columns[name], count) for name in TABLES[table]}


def _frame(epoch: int, seq: int, step: int, time_ns: int, *parts: Any) -> Frame:
    return Frame(epoch=epoch, seq=seq, step=step, time_ns=time_ns, **dict(zip(_FIELDS, parts, strict=True)))


def _which(parts: Mapping[str, Sequence[Any]]) -> Ints:
    """Of each frame a bit for each of `_BITS`: what may be absent and is there."""
    which = np.zeros(len(parts["blocks"]), np.int64)
    for bit, name in enumerate(_BITS):
        absent = _ABSENT.get(name)
        part = (
            [rows.parent != b"" for rows in parts["blocks"]]
            if name == "parents"
            else [each is not absent for each in parts[name]]
        )
        which |= np.array(part, np.int64) << bit
    return which


def _named(table: str, columns: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{table}.{name}": column for name, column in columns.items()}


def _unnamed(table: str, columns: Mapping[str, bytes]) -> dict[str, bytes]:
    begin = table + "."
    return {name.removeprefix(begin): column for name, column in columns.items() if name.startswith(begin)}
