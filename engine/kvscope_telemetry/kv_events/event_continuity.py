"""Orders batches of KV events and removes duplicates, and handles gaps, restarts and unreadable batches.

Owns the position in the sequence, the batches buffered while a replay fills a gap, and the reason for any uncertainty.
Uses no sockets and no clock: `event_stream` passes in what it receives and requests a replay if `wants` is set.

A publisher has no identity, and its sequence numbers restart at 0 with each start, so a number alone proves nothing.
Each replay therefore begins with the last batch that was passed on: if the engine sends exactly that batch again, it is
the same engine, and nothing is missing from there on. If not, all contents are dropped and requested from the
beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, EventBatch
from kvscope_telemetry.kv_events.decoding import decode_batch
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset, StreamItem

MAX_SEEN: Final = 1 << 14
MAX_GAPS: Final = 256
MAX_HELD_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 128
MAX_FRUITLESS: Final = 2
"""Number of consecutive replays without any of the missing batches after which the gap is accepted."""


class EventContinuity:
    """Checks that event batches arrive without gaps, and requests replays of missing ones.

    `put` is called with each item and its size in bytes. Without `can_replay`, missing batches cannot be requested.
    """

    def __init__(self, put: Callable[[StreamItem, int], None], *, can_replay: bool) -> None:
        self.counts = StreamCounts()
        self.last = -1
        """Sequence number of the last batch that was passed on or accepted as missing; -1 if none."""
        self.ts = 0.0
        self.rank: int | None = None
        self.has_joined = False
        """Whether cache contents are known since the last reset, even if they may be wrong."""
        self.uncertain = ""
        """Reason why the cache contents may be wrong; empty if they are certain."""
        self.wants = "joining" if can_replay else ""
        """Reason why a replay is needed; empty if none is needed."""
        self.is_replaying = False
        self.failed = False
        """Whether a replay that could have removed the uncertainty has failed."""
        self._put = put
        self._can_replay = can_replay
        self._buffered = BufferedBatches()
        self._seen = SeenBatches()
        self._is_same_engine = True
        self._is_check = False
        self._num_fruitless = 0
        self._requested = -1

    @property
    def is_checking(self) -> bool:
        """Whether the replay that is needed or in progress is only a check after a quiet time."""
        return self._is_check and (self.is_replaying or bool(self.wants))

    # Published batches

    def live(self, seq: int, payload: bytes) -> None:
        is_awaited = self.is_checking and self.has_joined and seq == self.last + 1
        if is_awaited or not (self.wants or self.is_replaying):
            self._process_next(seq, payload)
        else:
            self._buffered.push(seq, payload)

    def dropped(self) -> None:
        """Handle a published batch that was dropped in this process, because the queue was full."""
        self._request_replay("events arrived faster than they were read")

    def reconnected(self) -> None:
        """Handle a reconnection, after which batches may be missing or the engine may have been restarted."""
        if self._can_replay:
            self._request_replay("reconnected")
        elif self.has_joined:
            self.uncertain = (
                "the connection was lost for a while, and without a replay endpoint the missed events are unknown"
            )

    def switch_publisher(self) -> None:
        """Drop all contents, because from now on another publisher's batches are passed in."""
        self._reset("another publisher at this endpoint is shown now")

    def check(self) -> None:
        """Request a replay after a quiet time, to find out whether the last batches were missed."""
        if self._can_replay and not self.wants and not self.is_replaying:
            self.wants, self._is_check = "checking whether events were missed", True

    def try_again(self) -> None:
        """After a failed replay, request all batches again."""
        if self.failed:
            self._reset("requesting the missed events again")

    # Replays

    def begin_replay(self) -> int:
        """Start a replay. Returns the sequence number from which to request batches."""
        self.wants, self.is_replaying, self.failed = "", True, False
        self._is_same_engine = self.last < 0
        self._requested = self.last
        self.counts.replays += 0 if self._is_check else 1
        return max(self.last, 0)

    def replayed(self, seq: int, payload: bytes) -> None:
        if not self.is_replaying:
            return
        if not self._is_same_engine:
            self._is_same_engine = seq == self._requested and self._seen.is_same(seq, payload)
            if not self._is_same_engine:
                self._start_over(
                    f"batch {self._requested} differs from the one received before, or the engine no longer keeps it"
                )
            return
        self._start_at(seq)
        if seq == self.last + 1:
            if not self._accept(seq, payload):
                self._use_published_copy(seq, payload)
        elif seq > self.last:
            self._buffered.push(seq, payload)

    def end_replay(self) -> None:
        if not self.is_replaying:
            return
        self.is_replaying = self._is_check = False
        if not self._is_same_engine:
            self._start_over(f"the engine knows no batch {self._requested}")
            return
        self._num_fruitless = 0 if self.last > self._requested else self._num_fruitless + 1
        self.has_joined = True
        self._release()
        if not self.wants:
            self._num_fruitless = 0

    def fail_replay(self, why: str) -> None:
        """End a replay whose publisher has stopped answering.

        If some of its batches arrived, the missing ones are requested. Otherwise, reading continues without them, and
        the gap is reported.
        """
        was_check, self._is_check = self.is_checking, False
        self.is_replaying, self.wants = False, ""
        if self.last > self._requested and not was_check:
            self._request_replay("the replay was interrupted")
            return
        numbers = self._buffered.in_order()
        if not was_check or (numbers and numbers[0] > self.last + 1):
            self.uncertain, self.failed = why, True
        if numbers:
            self._start_at(numbers[0])
        self._num_fruitless = MAX_FRUITLESS
        self._release()
        self._num_fruitless = 0

    # Sequence

    def _process_next(self, seq: int, payload: bytes) -> None:
        """Process a batch at a time when no earlier batch is missing."""
        self._start_at(seq)
        if seq == self.last + 1:
            if not self._accept(seq, payload):
                self._request_unreadable(seq, payload)
        elif seq > self.last:
            self._buffered.push(seq, payload)
            self._release()
        elif self._seen.is_same(seq, payload) or self._is_late(seq, payload):
            self.counts.duplicates += 1
        else:
            self._start_over(f"batch {seq} came after {self.last}")
            if not self._can_replay:  # with replays, it is part of what was requested, unless it is older
                self._process_next(seq, payload)

    def _start_at(self, seq: int) -> None:
        """Let the sequence begin with batch `seq`. Does nothing if a batch was received before."""
        if self.last >= 0 or self.has_joined:
            return
        self.has_joined = True
        if seq > 0:
            self.uncertain = self.uncertain or f"what was cached before batch {seq} is unknown"
            self.last = seq - 1

    def _accept(self, seq: int, payload: bytes) -> bool:
        """Pass on the batch after `last`. Returns False if it cannot be decoded."""
        try:
            batch = decode_batch(payload)
        except ProtocolError:
            return False
        self._advance(seq, payload)
        self.ts, self.rank = batch.ts, batch.data_parallel_rank
        self.counts.count(batch)
        self._update_certainty(seq, batch)
        self._put(Received(seq, batch), len(payload))
        return True

    def _update_certainty(self, seq: int, batch: EventBatch) -> None:
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self.uncertain, self.failed = "", False  # the uncertain contents were removed
        if batch.num_unreadable_events:
            self.uncertain = f"{batch.num_unreadable_events} events of batch {seq} cannot be read: {batch.unreadable}"

    def _request_unreadable(self, seq: int, payload: bytes) -> None:
        """Request an unreadable batch again, because the engine's copy may be intact."""
        if self._may_request:
            self._buffered.push(seq, payload)
            self._request_replay(f"batch {seq} cannot be read")
        else:
            self._skip_unreadable(seq, payload)

    def _use_published_copy(self, seq: int, payload: bytes) -> None:
        """Use the published copy of a batch, because its replayed copy is unreadable."""
        published = self._buffered.pop(seq)
        if published is None or not self._accept(seq, published):
            self._skip_unreadable(seq, payload)

    def _skip_unreadable(self, seq: int, payload: bytes) -> None:
        try:
            decode_batch(payload)
        except ProtocolError as error:
            self.counts.unreadable += 1
            self._report_gap(seq, f"batch {seq} cannot be read: {error}")
            self._advance(seq, payload)

    def _advance(self, seq: int, payload: bytes) -> None:
        self.last = seq
        self._seen.add(seq, payload)

    def _release(self) -> None:
        """Pass on buffered batches up to the next gap, and request a replay of the missing batches. If no
        replay can be requested, the gap is reported and the following batches are passed on.
        """
        for seq in self._buffered.in_order():
            if self.wants:
                return
            if seq > self.last + 1:
                if self._may_request:
                    self._request_replay(f"batches {self.last + 1} to {seq - 1} are missing")
                    return
                self._report_gap(seq - 1, f"batches {self.last + 1} to {seq - 1} are missing")
            payload = self._buffered.pop(seq)
            if payload is not None and (seq > self.last or not self._seen.is_same(seq, payload)):
                self._process_next(seq, payload)

    def _report_gap(self, last: int, why: str) -> None:
        """Accept that the batches from the one after `self.last` up to `last` are missing."""
        first, self.last = self.last + 1, last
        self.uncertain = why
        self.counts.missing += last - first + 1
        self._seen.skip(first, last)
        self._put(Gap(first, last, why), 0)

    def _is_late(self, seq: int, payload: bytes) -> bool:
        """Whether the batch must be ignored: it was already accepted as missing and is now outdated, or it is
        unreadable.
        """
        try:
            return decode_batch(payload).ts <= self.ts and self._seen.was_skipped(seq)
        except ProtocolError:
            return True

    def _start_over(self, why: str) -> None:
        self.counts.restarts += 1
        self._reset(why)

    def _reset(self, why: str) -> None:
        self._put(Reset(why), 0)
        self.last = -1
        self.has_joined = self.is_replaying = self.failed = self._is_check = False
        self.uncertain = ""
        self._num_fruitless = 0
        self._buffered.clear()
        self._seen.clear()
        self._request_replay(why)

    @property
    def _may_request(self) -> bool:
        """Whether a replay can be requested, and fewer than `MAX_FRUITLESS` consecutive replays brought no missing
        batch.
        """
        return self._can_replay and self._num_fruitless < MAX_FRUITLESS

    def _request_replay(self, why: str) -> None:
        if self._can_replay:
            self.wants, self._is_check = why, False


class BufferedBatches:
    """Batches received while earlier ones are awaited, as bytes by sequence number; at most `max_bytes`.

    A batch that does not fit is dropped, which leaves a gap that a later replay fills.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._payloads: dict[int, bytes] = {}
        self._num_bytes = 0
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._payloads)

    def push(self, seq: int, payload: bytes) -> None:
        """Buffer a batch, replacing one with the same number."""
        self.pop(seq)
        num_bytes = len(payload) + _ENTRY_BYTES
        if self._num_bytes + num_bytes <= self._max_bytes:
            self._payloads[seq] = payload
            self._num_bytes += num_bytes

    def pop(self, seq: int) -> bytes | None:
        payload = self._payloads.pop(seq, None)
        if payload is not None:
            self._num_bytes -= len(payload) + _ENTRY_BYTES
        return payload

    def in_order(self) -> list[int]:
        return sorted(self._payloads)

    def clear(self) -> None:
        self._payloads.clear()
        self._num_bytes = 0


class SeenBatches:
    """Recent batches that were passed on or accepted as missing, to recognize duplicates, late batches and other
    engines.

    Batches are compared by a hash of their bytes, because a publisher has no identity. Covers one start of one
    publisher.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, int] = {}  # sequence number -> hash, oldest first
        self._gaps: deque[tuple[int, int]] = deque(maxlen=MAX_GAPS)

    def add(self, seq: int, payload: bytes) -> None:
        """Record a batch that was passed on or could not be decoded."""
        self._hashes[seq] = hash(payload)
        if len(self._hashes) > MAX_SEEN:
            for oldest in list(islice(self._hashes, MAX_SEEN // 8)):
                del self._hashes[oldest]

    def skip(self, first: int, last: int) -> None:
        """Record the batches `first` to `last` as accepted as missing."""
        self._gaps.append((first, last))

    def is_same(self, seq: int, payload: bytes) -> bool:
        """Whether a batch with this number and exactly these bytes was recorded."""
        return self._hashes.get(seq) == hash(payload)

    def was_skipped(self, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self._gaps)

    def clear(self) -> None:
        self._hashes.clear()
        self._gaps.clear()


@dataclass(slots=True)
class StreamCounts:
    """Counters of a stream of KV events since it was opened, as in `StreamStatus`."""

    batches: int = 0
    events: int = 0
    missing: int = 0
    unreadable: int = 0
    unknown_events: int = 0
    unknown_fields: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0

    def count(self, batch: EventBatch) -> None:
        self.batches += 1
        self.events += len(batch.events)
        self.unreadable += batch.num_unreadable_events
        self.unknown_events += batch.num_unknown_events
        self.unknown_fields += batch.num_unknown_fields
