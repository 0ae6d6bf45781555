"""Table of steps: one row per step of the engine.

Owns the columns and their units. Values that the engine did not report are empty, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.exports.tables.recording_description import about
from kvscope_telemetry.exports.tables.table import Column, Table
from kvscope_telemetry.messages.telemetry import NO_TIMINGS, Frame, Snapshot
from kvscope_telemetry.summaries.unknown_fields import unknown_fields

_ID_BYTES: Final = 4
_COLUMNS: Final = (
    ("epoch", "", "start of the engine"),
    ("step", "", "number of the step within the engine start"),
    ("num_requests", "requests", "requests that ran in the step"),
    ("num_prefill_tokens", "tokens", "prompt tokens computed"),
    ("num_decode_tokens", "tokens", "tokens of decodes"),
    ("num_running", "requests", "running after the step"),
    ("num_waiting", "requests", "waiting after the step"),
    ("total_ns", "ns", "duration of the step"),
    ("schedule_ns", "ns", "choosing requests and blocks"),
    ("run_ns", "ns", "running the model"),
    ("forward_ns", "ns", "forward pass on the device, part of run_ns"),
    ("commit_ns", "ns", "storing the sampled tokens"),
    ("flops", "FLOP", "operations of the forward pass"),
    ("moved_bytes", "bytes", "read from and written to device memory"),
    ("num_evicted_blocks", "blocks", "lost their cached prefix"),
    ("num_copied_blocks", "blocks", "copied before a write (copy-on-write)"),
    ("num_saved_blocks", "blocks", "written to a lower tier"),
    ("num_loaded_blocks", "blocks", "read from a lower tier"),
)
"""Name, unit and description of each column after the times, in the order of `_values`."""
_NO_ROW: Final[tuple[list[int | None], ...]] = tuple([] for _ in _COLUMNS)


def steps_table(content: Content) -> Table:
    """Return one row per step, sorted by time; empty if the engine does not report steps."""
    span, rows = content.span, list(_rows(content, content.span))
    times = np.array([time_ns for time_ns, _ in rows], np.int64)
    values = tuple(map(list, zip(*(row for _, row in rows), strict=True))) if rows else _NO_ROW
    columns = (
        Column("time_ns", "time", times, "ns", "end of the step, since 1970"),
        Column("second_s", "float", (times - span.start_ns) / 1e9, "s", "the same from the recording's start"),
        *(
            Column(name, "int", column, unit, description)
            for (name, unit, description), column in zip(_COLUMNS, values, strict=True)
        ),
    )
    return Table("steps", columns, about(content.recording, span))


def _rows(content: Content, span: Span) -> Iterator[tuple[int, tuple[int | None, ...]]]:
    """Yield time and values of each step. Frames are not kept, because a long recording has a million."""
    unknown: frozenset[str] = frozenset()
    for time_ns, message in content.messages():
        if isinstance(message, Snapshot):
            unknown = unknown_fields(message.hello.capabilities)
        elif isinstance(message, Frame) and message.batch.number and time_ns >= span.from_ns:
            if "num_steps" in unknown:  # a frame is one poll of the engine
                continue
            yield time_ns, _values(message, has_moves="copied_blocks" not in unknown)


def _values(frame: Frame, *, has_moves: bool) -> tuple[int | None, ...]:
    batch, timings, work, moves, counters = frame.batch, frame.timings, frame.work, frame.moves, frame.counters
    is_timed = timings != NO_TIMINGS
    return (
        frame.epoch,
        frame.step,
        len(batch.number) // _ID_BYTES,
        batch.num_prefill_tokens,
        batch.num_decode_tokens,
        counters.num_running,
        counters.num_waiting,
        timings.schedule_ns + timings.run_ns + timings.commit_ns if is_timed else None,
        timings.schedule_ns if is_timed else None,
        timings.run_ns if is_timed else None,
        timings.forward_ns or None,
        timings.commit_ns if is_timed else None,
        work.flops or None,
        work.num_bytes or None,
        len(moves.evicted) // _ID_BYTES,
        len(moves.copied) // _ID_BYTES if has_moves else None,
        len(moves.saved) // _ID_BYTES if has_moves else None,
        len(moves.loaded) // _ID_BYTES if has_moves else None,
    )
