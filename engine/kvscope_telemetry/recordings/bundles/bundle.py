"""A bundle: the frames of a second or less as one message of a recording, and back, byte for byte.

Columns of all frames lie side by side, each number told by what went before it in the bundle, so that what goes on as
it did costs next to nothing. Hashes lie in lists before it (`hash_lists`); nothing else that is before it in the file
is needed. It is msgpack: a map of columns by name (`kvscope.Bundle`). Frames of which it could not give every byte
back, such as those of a later version, are refused, and belong in the file as they came. Knows no files. What is read
is checked for what unpacking needs; the frames as messages are checked where they go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import Counters, Event, Frame, RequestInfo, TelemetryMessage, Timings, Work
from kvscope_telemetry.recordings.bundles.block_columns import pack_blocks, speaks_of, unpack_blocks
from kvscope_telemetry.recordings.bundles.block_columns import unpack_ids as unpack_block_ids
from kvscope_telemetry.recordings.bundles.groups import joined, pack_counts, unpack_counts
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, pack_deltas, unpack, unpack_deltas
from kvscope_telemetry.recordings.bundles.references import Known
from kvscope_telemetry.recordings.bundles.request_columns import (
    moves_others,
    pack_batches,
    pack_moves,
    pack_requests,
    pack_times,
    unpack_batches,
    unpack_moves,
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
_NUMBERS: Final = (
    "seq",
    "step",
    "time_ns",
    "batch.num_prefill_tokens",
    "batch.num_decode_tokens",
    *(f"timings.{name}" for name in Timings.__struct_fields__),
    *(f"counters.{name}" for name in Counters.__struct_fields__),
    *(f"work.{name}" for name in Work.__struct_fields__),
)
_numbers_of: Final = attrgetter(*_NUMBERS)
_SUMS: Final = slice(3, 5)
_TIMINGS: Final = slice(5, 5 + len(Timings.__struct_fields__))
_COUNTERS: Final = slice(_TIMINGS.stop, _TIMINGS.stop + len(Counters.__struct_fields__))
_WORK: Final = slice(_COUNTERS.stop, None)
_NEWER: Final = dict.fromkeys(
    (
        *("counters.draft_tokens", "counters.accepted_tokens"),
        *("requests.num_draft_tokens", "requests.num_accepted_tokens"),
        *(f"work.{name}" for name in Work.__struct_fields__),
    ),
    b"\0",
)
"""Columns that bundles of earlier versions are without: all 0."""
_OPTIONAL: Final = ("blocks", "requests", "batch", "timings", "counters", "moves")
"""Left out of a message where they are their defaults."""
_LOG_TIME: Final = "log_time_ns"
_TIMES: Final = ("first_token_ns", "inter_token_ns")
_FIELDS: Final = Frame.__struct_fields__[4:]
"""Those of a frame after its head."""
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
    columns: dict[str, bytes]
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
    numbers = np.array([_numbers_of(frame) for frame in frames], np.int64).T
    blocks = Known(*joined([frame.blocks.ids for frame in frames], "<u4"))
    changed = Known(*joined([frame.requests.number for frame in frames], "<u4"))
    columns = {name: pack_deltas(column) for name, column in zip(_NUMBERS, numbers, strict=True)}
    columns[_LOG_TIME] = pack_deltas(np.array([at_ns for at_ns, _ in timed], np.int64) - numbers[2])
    columns["is_there"] = pack(_which(frames))
    columns["rows"] = pack_counts(blocks.groups)
    columns |= _named("blocks", pack_blocks([frame.blocks for frame in frames], numbers[1], blocks, into, timed[0][0]))
    columns |= _named("requests", pack_requests([frame.requests for frame in frames], changed, blocks))
    columns |= _named("batch", pack_batches([frame.batch for frame in frames], changed))
    columns |= _named("moves", pack_moves([frame.moves for frame in frames], blocks))
    for name in _TIMES:
        columns[f"{name}_rows"], columns[name] = pack_times([getattr(frame, name) for frame in frames])
    for name, told in _TOLD.items():
        columns |= _named(name, told.pack([getattr(frame, name) for frame in frames], numbers[2]))
    return _ENCODER.encode(_Bundle(len(frames), frames[0].epoch, columns))


def unpack_bundle(data: bytes, lists: HashesOf) -> list[TimedFrame]:
    """What `pack_bundle` was given; `lists` have the hashes. Raises ProtocolError."""
    with _readable():
        return _unpacked(_decoded(data), lists)


def span_of_bundle(data: bytes) -> tuple[int, int]:
    """How many frames it has, and the latest log time of one. Raises ProtocolError."""
    with _readable():
        bundle = _decoded(data)
        times, log_times = (unpack_deltas(bundle.columns[name], bundle.num_frames) for name in ("time_ns", _LOG_TIME))
        return bundle.num_frames, int((times + log_times).max())


def leap_past(data: bytes, block: int) -> tuple[int, Leap] | None:
    """A leap over the frames of a bundle that say nothing of `block`, and the log time of the last; None where they
    speak of it, or are not one after another. Nothing else of them is unpacked. Raises ProtocolError."""
    with _readable():
        bundle = _decoded(data)
        columns, count = bundle.columns, bundle.num_frames
        groups = unpack_counts(columns["rows"], count)
        if speaks_of(_unnamed("blocks", columns), groups, block):
            return None
        if moves_others(_unnamed("moves", columns), count, block):
            return None
        seq, step, time_ns = (unpack_deltas(columns[name], count) for name in _NUMBERS[:3])
        if np.any(np.diff(seq) != 1):
            return None
        log_time_ns = unpack_deltas(columns[_LOG_TIME], count)[-1] + time_ns[-1]
        last_seq, last_step, last_ns = int(seq[-1]), int(step[-1]), int(time_ns[-1])
        since_seq = int(seq[0]) - 1
        leap = Leap(epoch=bundle.epoch, seq=last_seq, since_seq=since_seq, step=last_step, time_ns=last_ns)
        return int(log_time_ns), leap


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Whatever is wrong with a bundle is a ProtocolError."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, OverflowError, IndexError, RecursionError) as error:
        raise ProtocolError(f"a bundle that cannot be read: {str(error).splitlines()[0]}") from None
    except KeyError as error:
        raise ProtocolError(f"a bundle without its column {error}") from None


def _decoded(data: bytes) -> _Bundle:
    if len(data) > MAX_BUNDLE_BYTES:
        raise ProtocolError(f"a bundle of {len(data)} bytes is refused: at most {MAX_BUNDLE_BYTES} are accepted")
    bundle = _BUNDLES.decode(data)
    if not 0 < bundle.num_frames <= MAX_FRAMES:
        raise ProtocolError(f"a bundle of {bundle.num_frames} frames: 1 to {MAX_FRAMES} are accepted")
    return bundle


def _unpacked(bundle: _Bundle, lists: HashesOf) -> list[TimedFrame]:
    count = bundle.num_frames
    told = _NEWER | bundle.columns
    numbers = np.array([unpack_deltas(told[name], count) for name in _NUMBERS])
    log_times = unpack_deltas(bundle.columns[_LOG_TIME], count) + numbers[2]
    heads = zip(*numbers[:3].tolist(), strict=True)
    parts = zip(*_parts(bundle, numbers, lists), strict=True)
    frames = (_frame(bundle.epoch, *head, *part) for head, part in zip(heads, parts, strict=True))
    return list(zip(log_times.tolist(), frames, strict=True))


def _parts(bundle: _Bundle, numbers: Ints, lists: HashesOf) -> list[Sequence[Any]]:
    """What each frame has besides its head, a list a field."""
    columns, count = _NEWER | bundle.columns, bundle.num_frames
    there = unpack(columns["is_there"], count)
    groups = unpack_counts(columns["rows"], count)
    of_blocks, of_requests = _unnamed("blocks", columns), _unnamed("requests", columns)
    ids = unpack_block_ids(of_blocks, groups)
    requests, changed, number_groups = unpack_requests(of_requests, count, ids, groups)
    sums = numbers[_SUMS].tolist()
    has_parents = (there & _PARENTS).tolist()
    parts: dict[str, Sequence[Any]] = {
        "blocks": unpack_blocks(of_blocks, numbers[1], groups, ids, has_parents, lists),
        "requests": requests,
        "batch": unpack_batches(_unnamed("batch", columns), count, changed, number_groups, sums),
        "timings": [Timings(*each) for each in numbers[_TIMINGS].T.tolist()],
        "counters": [Counters(*each) for each in numbers[_COUNTERS].T.tolist()],
        "moves": unpack_moves(_unnamed("moves", columns), count, ids, groups),
        "work": [Work(*each) for each in numbers[_WORK].T.tolist()],
    }
    for bit, name in enumerate(_BITS):
        if name not in parts:
            continue
        absent = _ABSENT[name]
        is_there = (there & (1 << bit)).tolist()
        parts[name] = [part if has else absent for part, has in zip(parts[name], is_there, strict=True)]
    for name in _TIMES:
        parts[name] = unpack_times((columns[f"{name}_rows"], columns[name]), count)
    for name, told in _TOLD.items():
        parts[name] = getattr(bundle, name) or told.unpack(_unnamed(name, columns), numbers[2])
    return [parts[name] for name in _FIELDS]


def _frame(epoch: int, seq: int, step: int, time_ns: int, *parts: Any) -> Frame:
    return Frame(epoch=epoch, seq=seq, step=step, time_ns=time_ns, **dict(zip(_FIELDS, parts, strict=True)))


def _which(frames: Sequence[Frame]) -> Ints:
    """Of each a bit for each of `_BITS`: what may be absent and is there."""
    there = [[_has(frame, name) for frame in frames] for name in _BITS]
    which: Ints = (np.array(there, np.int64) << np.arange(len(there))[:, None]).sum(axis=0)
    return which


def _has(frame: Frame, name: str) -> bool:
    return frame.blocks.parent != b"" if name == "parents" else getattr(frame, name) is not _ABSENT[name]


def _named(table: str, columns: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{table}.{name}": column for name, column in columns.items()}


def _unnamed(table: str, columns: Mapping[str, bytes]) -> dict[str, bytes]:
    begin = table + "."
    return {name.removeprefix(begin): column for name, column in columns.items() if name.startswith(begin)}
