"""Steps in a range of time: when each ran, and its number of tokens per request. Read from a recording;
imports no Qt.
"""

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
"""Maximum number of steps per read. Later steps in the range are left out."""
_REPORT_INTERVAL: Final = 64
_NUM_COLUMNS: Final = 9
_NO_VALUES: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Numbers of the requests in one step, and each request's number of tokens; shape (num_requests,) each."""

    numbers: IntArray
    tokens: IntArray


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Steps from `first_ns` to `last_ns` as columns of shape (n,), oldest first. Times are wall-clock."""

    first_ns: int
    last_ns: int
    begin_ns: IntArray
    end_ns: IntArray
    epoch: IntArray
    step: IntArray
    prefill: IntArray
    """Number of prefill tokens in each step. `decode` has the decode tokens."""
    decode: IntArray
    starts: IntArray
    """Index in `numbers` and `tokens` of each step's first request, shape (n + 1,)."""
    numbers: IntArray
    tokens: IntArray
    flops: IntArray = field(default_factory=lambda: _NO_VALUES)
    """FLOPs of each step. `flops` and `num_bytes` are 0 if the engine does not report the work of steps."""
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
        """Return the index of the step at `time_ns` or, if there is none, of the nearest step at most `reach_ns` away.
        Returns None if there is no such step.
        """
        index = int(np.searchsorted(self.end_ns, time_ns, "left"))
        candidates = [candidate for candidate in (index - 1, index) if 0 <= candidate < len(self)]
        distances = {
            candidate: max(int(self.begin_ns[candidate]) - time_ns, time_ns - int(self.end_ns[candidate]), 0)
            for candidate in candidates
        }
        nearest = min(candidates, key=lambda candidate: distances[candidate], default=None)
        return nearest if nearest is not None and distances[nearest] <= reach_ns else None

    def neighbor_index(self, time_ns: int, sign: int) -> int | None:
        """Return the index of a step next to the cursor time `time_ns`, or None if there is no such step.

        With `sign` 1, this is the first step that ends after `time_ns`. With `sign` -1, it is the step before the last
        one that ended by `time_ns`: the cursor is already at the end of that one.
        """
        num_ended = int(np.searchsorted(self.end_ns, time_ns, "right"))
        index = num_ended if sign > 0 else num_ended - 2
        return index if 0 <= index < len(self) else None

    def batch(self, index: int) -> StepBatch:
        offsets = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return StepBatch(self.numbers[offsets], self.tokens[offsets])


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


def read_steps(recorded: Recording, begin_ns: int, end_ns: int, report_progress: ProgressCallback) -> StepColumns:
    """Read the steps recorded from `begin_ns` to `end_ns`, at most `MAX_STEPS`. A frame's time is the end of its step.

    Raises OpeningCancelled if `report_progress` (called with the share read, 0 to 1) returns False.
    """
    start_ns = recorded.start_ns
    rows: list[tuple[int, ...]] = []
    numbers: list[bytes] = []
    tokens: list[bytes] = []
    length_s = max((end_ns - begin_ns) / 1e9, 1e-9)
    last_ns, previous_ns = max(recorded.end_ns, begin_ns), begin_ns
    from_s, until_s = max((begin_ns - start_ns) / 1e9, 0.0), (end_ns - start_ns) / 1e9
    for count, (at_s, message) in enumerate(recorded.messages(from_s, until_s)):
        if count % _REPORT_INTERVAL == 0 and not report_progress(min(max((at_s - from_s) / length_s, 0.0), 1.0)):
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
        np.frombuffer(b"".join(map(_fit_length, tokens, sizes)), "<u4").astype(np.int64),
        *work,
    )


def _row(frame: Frame, time_ns: int, previous_ns: int) -> tuple[int, ...]:
    timings = frame.timings
    begin_ns = min(max(time_ns - timings.schedule_ns - timings.run_ns - timings.commit_ns, previous_ns), time_ns)
    batch, work = frame.batch, frame.work
    figures = (batch.num_prefill_tokens, batch.num_decode_tokens, work.flops, work.num_bytes, timings.forward_ns)
    return begin_ns, time_ns, frame.epoch, frame.step, *figures


def _fit_length(packed: bytes, size: int) -> bytes:
    """Pad a packed uint32 column with zeros, or truncate it, to `size` values."""
    return packed[: 4 * size].ljust(4 * size, b"\0")
