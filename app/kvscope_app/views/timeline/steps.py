"""Steps in a stretch of time: when each ran, and with how many tokens of which requests. Read from recorded frames;
imports no Qt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording

IntArray = npt.NDArray[np.int64]
MAX_STEPS: Final = 12_000
"""Maximum number of steps per read; later steps are not drawn individually."""
_REPORT_INTERVAL: Final = 64
_NUM_COLUMNS: Final = 9
_NO_VALUES: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Requests that ran in one step, and their numbers of tokens; shape (num_requests,) each."""

    numbers: IntArray
    tokens: IntArray


@dataclass(frozen=True, slots=True)
class StepColumns:
    """All steps between `first_ns` and `last_ns` as columns of shape (n,), oldest first. Times are wall clock."""

    first_ns: int
    last_ns: int
    begin_ns: IntArray
    end_ns: IntArray
    epoch: IntArray
    step: IntArray
    prefill: IntArray
    """Prefill tokens of each step; `decode` holds the decode tokens."""
    decode: IntArray
    starts: IntArray
    """Offset of each step's requests in `numbers` and `tokens`, shape (n + 1,)."""
    numbers: IntArray
    tokens: IntArray
    flops: IntArray = field(default_factory=lambda: _NO_VALUES)
    """FLOPs of each step, shape (n,); this and `num_bytes` are 0 if the engine does not report the work of steps."""
    num_bytes: IntArray = field(default_factory=lambda: _NO_VALUES)
    forward_ns: IntArray = field(default_factory=lambda: _NO_VALUES)

    def __len__(self) -> int:
        return self.step.size

    def covers(self, begin_ns: int, end_ns: int) -> bool:
        return self.first_ns <= begin_ns and end_ns <= self.last_ns

    def within(self, begin_ns: int, end_ns: int) -> slice:
        first = int(np.searchsorted(self.end_ns, begin_ns, "left"))
        return slice(first, max(first, int(np.searchsorted(self.begin_ns, end_ns, "right"))))

    def index_at(self, time_ns: int, reach_ns: int = 0) -> int | None:
        """Return the index of the step that ran at `time_ns`, else of the nearest one at most `reach_ns` away, else
        None."""
        index = int(np.searchsorted(self.end_ns, time_ns, "left"))
        near = [at for at in (index - 1, index) if 0 <= at < len(self)]
        away = {at: max(int(self.begin_ns[at]) - time_ns, time_ns - int(self.end_ns[at]), 0) for at in near}
        best = min(near, key=lambda at: away[at], default=None)
        return best if best is not None and away[best] <= reach_ns else None

    def neighbor_index(self, time_ns: int, sign: int) -> int | None:
        """Return the index of the first step that ended after `time_ns`. For a negative `sign`, that of the step before
        the last one that ended by then."""
        ended = int(np.searchsorted(self.end_ns, time_ns, "right"))
        index = ended if sign > 0 else ended - 2
        return index if 0 <= index < len(self) else None

    def batch(self, index: int) -> StepBatch:
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return StepBatch(self.numbers[part], self.tokens[part])


NO_STEPS: Final = StepColumns(
    0,
    0,
    _NO_VALUES,
    _NO_VALUES,
    _NO_VALUES,
    _NO_VALUES,
    _NO_VALUES,
    _NO_VALUES,
    np.zeros(1, np.int64),
    _NO_VALUES,
    _NO_VALUES,
)


def read_steps(recorded: Recording, begin_ns: int, end_ns: int, watch: ProgressCallback) -> StepColumns:
    """Read the steps recorded in this time, at most `MAX_STEPS`. A frame is published at the end of its step.

    Raises OpeningCancelled if `watch` returns False.
    """
    start_ns = recorded.start_ns
    rows: list[tuple[int, ...]] = []
    numbers: list[bytes] = []
    tokens: list[bytes] = []
    length_s = max((end_ns - begin_ns) / 1e9, 1e-9)
    last_ns, previous_ns = max(recorded.end_ns, begin_ns), begin_ns
    from_s, until_s = max((begin_ns - start_ns) / 1e9, 0.0), (end_ns - start_ns) / 1e9
    for count, (at_s, message) in enumerate(recorded.messages(from_s, until_s)):
        if count % _REPORT_INTERVAL == 0 and not watch(min(max((at_s - from_s) / length_s, 0.0), 1.0)):
            raise OpeningCancelled
        if not isinstance(message, Frame) or not message.batch.number:
            continue
        if len(rows) >= MAX_STEPS:
            last_ns = previous_ns
            break
        time_ns = start_ns + round(at_s * 1e9)
        rows.append(_row(message, time_ns, previous_ns))
        numbers.append(message.batch.number)
        tokens.append(message.batch.num_tokens)
        previous_ns = time_ns
    begin, end, epoch, step, prefill, decode, *work = np.array(rows, np.int64).reshape(len(rows), _NUM_COLUMNS).T
    sizes = [len(each) // 4 for each in numbers]
    return StepColumns(
        begin_ns,
        min(end_ns, last_ns),
        begin,
        end,
        epoch,
        step,
        prefill,
        decode,
        np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
        np.frombuffer(b"".join(numbers), "<u4").astype(np.int64),
        np.frombuffer(b"".join(map(_as_long, tokens, sizes)), "<u4").astype(np.int64),
        *work,
    )


def _row(frame: Frame, time_ns: int, previous_ns: int) -> tuple[int, ...]:
    took = frame.timings
    begin_ns = min(max(time_ns - took.schedule_ns - took.run_ns - took.commit_ns, previous_ns), time_ns)
    batch, work = frame.batch, frame.work
    figures = (batch.num_prefill_tokens, batch.num_decode_tokens, work.flops, work.num_bytes, took.forward_ns)
    return begin_ns, time_ns, frame.epoch, frame.step, *figures


def _as_long(packed: bytes, size: int) -> bytes:
    """Pad or cut a packed uint32 column to `size` values; missing ones are 0."""
    return packed[: 4 * size].ljust(4 * size, b"\0")
