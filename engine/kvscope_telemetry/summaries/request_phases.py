"""Detects phases of requests that no event reports: a request arrived and waits, or its prefill is done and decoding
starts.

Defines how phases are packed in a summary, and limits their number in a session (the newest are retained). Must not
depend on files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.telemetry import Batch, Frame, Snapshot
from kvscope_telemetry.request_phase import ENDS, RequestPhase, phase_of_state

MAX_PHASES: Final = 200_000
PHASE: Final = np.dtype([("time_ns", "<i8"), ("number", "<u4"), ("kind", "u1")])
"""Dtype of the start of a phase as packed in a summary. Times are on the recording's clock. `moments` packs rows of the
same dtype, with times on the engine's clock.
"""
_ROW: Final = np.dtype([*PHASE.descr, ("epoch", "<i8")])
_LAST_NS: Final = (1 << 62) - 1
_STORED: Final = (RequestPhase.QUEUED, RequestPhase.PREFILL, RequestPhase.DECODE, RequestPhase.PREEMPTED)
_CODES: Final = {phase: code for code, phase in enumerate(_STORED)}
PhaseRows = npt.NDArray[np.void]


class PhaseRecorder:
    """Detects the start of phases. Feed it every snapshot and frame in order; `drain` returns the phases packed."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, int, RequestPhase]] = []
        self._announced: set[int] = set()
        self._decoding: set[int] = set()
        self._prefilled_ns: dict[int, int] = {}
        self._last_batch = b""
        """Request numbers of the last step if it only decoded, else empty. An identical batch needs no processing."""

    def restart(self) -> None:
        self._announced, self._decoding, self._prefilled_ns, self._last_batch = set(), set(), {}, b""

    def drain(self) -> bytes:
        phases, self._pending = self._pending, []
        return packed_phases(phases)

    def snapshot(self, snapshot: Snapshot, offset_ns: int) -> None:
        rows = snapshot.requests
        numbers = np.frombuffer(rows.number, "<u4").tolist()
        states, outputs = np.frombuffer(rows.state, "u1").tolist(), np.frombuffer(rows.num_output_tokens, "<u4")
        arrivals = {info.number: info.arrival_ns for info in snapshot.requests_info}
        for number, state, output in zip(numbers, states, outputs.tolist(), strict=False):
            kind = phase_of_state(state, output)
            if number in self._announced or number not in arrivals or kind is None:
                continue
            self._announced.add(number)
            if kind is RequestPhase.DECODE:
                self._decoding.add(number)
            since_ns = arrivals[number] if kind is RequestPhase.QUEUED else snapshot.time_ns
            self._record(since_ns + offset_ns, number, kind)

    def frame(self, frame: Frame, offset_ns: int) -> None:
        for info in frame.new_requests:
            self._announced.add(info.number)
            self._record(info.arrival_ns + offset_ns, info.number, RequestPhase.QUEUED)
        batch = frame.batch
        if batch.num_prefill_tokens or batch.number != self._last_batch:
            self._process_batch(batch, frame.time_ns + offset_ns)
        self._last_batch = b"" if batch.num_prefill_tokens else batch.number
        for event in frame.events:  # after the batch: an ended request ran in it
            if event.kind in ENDS:
                self._drop(event.number)
                self._announced.discard(event.number)
            elif event.kind == "preempted":
                self._drop(event.number)

    def _process_batch(self, batch: Batch, time_ns: int) -> None:
        """Record the phases that a batch starts. Decoding starts at the end of the request's last prefill chunk."""
        numbers, sizes = np.frombuffer(batch.number, "<u4").tolist(), np.frombuffer(batch.num_tokens, "<u4").tolist()
        decoding = self._decoding
        # Most requests continue decoding and need no iteration of the loop.
        changed = [(n, size) for n, size in zip(numbers, sizes, strict=False) if size != 1 or n not in decoding]
        prefills = self._prefill_chunks(changed, batch.num_prefill_tokens)
        for number, _ in changed:
            if number in prefills:
                decoding.discard(number)
                self._prefilled_ns[number] = time_ns
            elif number not in decoding:
                decoding.add(number)
                self._record(self._prefilled_ns.pop(number, time_ns), number, RequestPhase.DECODE)

    def _prefill_chunks(self, changed: list[tuple[int, int]], num_prefill_tokens: int) -> set[int]:
        """Return the requests that computed a prefill chunk.

        A decoding request with several tokens verifies draft tokens, provided that the other requests account for all
        prefill tokens.
        """
        if not num_prefill_tokens:
            return set()
        with_several = {number for number, size in changed if size != 1}
        num_other_tokens = sum(size for number, size in changed if number not in self._decoding)
        return with_several - self._decoding if num_other_tokens >= num_prefill_tokens else with_several

    def _drop(self, number: int) -> None:
        self._last_batch = b""
        self._decoding.discard(number)
        self._prefilled_ns.pop(number, None)

    def _record(self, time_ns: int, number: int, kind: RequestPhase) -> None:
        if 0 < number < 1 << 32:
            self._pending.append((min(max(time_ns, 0), _LAST_NS), number, kind))


class PhaseLog:
    """The newest `max_phases` phases of a session, in the order in which they were reported."""

    def __init__(self, max_phases: int = MAX_PHASES) -> None:
        self.num_forgotten = 0
        self.is_available = False
        """Whether the newest summary reports phases. Older engines and recordings do not."""
        self._max_phases = max_phases
        self._rows: PhaseRows = np.empty(64, _ROW)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def rows(self) -> PhaseRows:
        """Starts of phases, shape (n,), with the fields `time_ns`, `number`, `kind` and `epoch`."""
        return self._rows[: self._size]

    def add(self, packed: bytes | None, epoch: int) -> None:
        """Add the packed phases of a summary; None if the summary does not report them."""
        self.is_available = packed is not None
        added = np.frombuffer(packed or b"", PHASE, count=len(packed or b"") // PHASE.itemsize)
        if not added.size:
            return
        while self._rows.size < self._size + added.size:
            self._rows = np.concatenate((self._rows, np.empty_like(self._rows)))
        target = self._rows[self._size : self._size + added.size]
        for name in PHASE.names or ():
            target[name] = added[name]
        target["time_ns"] = target["time_ns"].clip(0, _LAST_NS)
        target["epoch"] = epoch
        self._size += added.size
        if self._size > self._max_phases:
            self._drop(self._size - self._max_phases * 7 // 8)

    def forget_before(self, time_ns: int) -> None:
        """Drop the phases that were added before the first phase with a time of at least `time_ns`."""
        retained = np.flatnonzero(self.rows["time_ns"] >= time_ns)
        self._drop(int(retained[0]) if retained.size else self._size)

    def _drop(self, count: int) -> None:
        if count:
            self._rows[: self._size - count] = self._rows[count : self._size].copy()
            self._size -= count
            self.num_forgotten += count


def packed_phases(starts: Iterable[tuple[int, int, RequestPhase]]) -> bytes:
    """Pack phase starts, each (time in ns, request number, phase), as in a summary."""
    return np.array([(time_ns, number, _CODES[phase]) for time_ns, number, phase in starts], PHASE).tobytes()


def decoded_phase_rows(rows: Iterable[np.void]) -> list[tuple[int, int, int, RequestPhase]]:
    """Return (time, epoch, request number, phase) of each row, leaving out phases that this version does not know."""
    plain = ((int(r["time_ns"]), int(r["epoch"]), int(r["number"]), int(r["kind"])) for r in rows)
    return [(time_ns, epoch, number, _STORED[code]) for time_ns, epoch, number, code in plain if code < len(_STORED)]
