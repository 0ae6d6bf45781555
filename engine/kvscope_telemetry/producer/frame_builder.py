"""Builds all frames and snapshots that an engine publishes, from its state.

Owns the sequence numbers of an epoch, the time of each request's newest token, and the packing of requests. The module
reads the ledger and the requests without modifying them; `CacheState` and the `StepRecorder` of kvscope's engine pass
in the changes. Must not depend on an engine, a socket or a thread.

See docs/internals/decisions/0027-one-builder-of-frames.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import Ledger, pack_u4, pack_u8
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import (
    NO_REQUESTS,
    NO_WORK,
    Batch,
    Counters,
    Event,
    Frame,
    Hello,
    Moves,
    RequestInfo,
    RequestRows,
    Snapshot,
    Timings,
    Work,
)
from kvscope_telemetry.running_time import RunningTime

MAX_U2: Final = (1 << 16) - 1


class RequestFacts(Protocol):
    """Values of a request that frames report."""

    @property
    def number(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def state(self) -> RequestState: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def waits_for(self) -> WaitsFor: ...
    @property
    def tables(self) -> Sequence[Sequence[int]]:
        """Block ids, one table per KV group."""


class RequestUpdates(NamedTuple):
    new: tuple[RequestInfo, ...] = ()
    changed: Sequence[RequestFacts] = ()
    """Requests with any changed value, including the new requests."""
    unchanged_entries: Mapping[int, int] = {}
    """Number of leading entries that are unchanged in the request's block table of each KV group, by request
    number. Requests with unchanged tables are absent.
    """
    unchanged_group_entries: Mapping[tuple[int, int], int] = {}
    """Number of leading entries that are unchanged in a single KV group's block table, by (request number, KV
    group). Takes effect where it is smaller than `unchanged_entries`.
    """


_columns_of: Final = attrgetter(
    "number",
    "state",
    "num_computed_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "waits_for",
)


class FrameBuilder:
    """Builds the frames and snapshots of one epoch.

    Args:
        take_changed: Returns the ids of the ledger's rows that changed since its last call.
        publish: Called with each frame. Must not block.
        running_time: Pauses and suspensions, which latencies exclude.
    """

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        take_changed: Callable[[], npt.NDArray[np.uint32]],
        *,
        publish: Callable[[Frame], object] = lambda frame: None,
        running_time: RunningTime | None = None,
    ) -> None:
        self.seq = 0
        """Number of the last frame; 0 before the first."""
        self.step = 0
        self.last_token_ns: dict[int, int] = {}
        """Time of the newest token of each unfinished request, by request number."""
        self._epoch = epoch
        self._ledger = ledger
        self._take_changed = take_changed
        self._publish = publish
        self._running_time = (
            RunningTime() if running_time is None else running_time
        )  # not `or`: without stops it is falsy
        self._first_token_ns: list[int] = []
        self._inter_token_ns: list[int] = []

    def count_tokens(self, new_tokens: Iterable[tuple[RequestFacts, int]], time_ns: int) -> int:
        """Record the numbers of tokens that requests received at `time_ns`, and return their sum.

        If a request receives several tokens at once, the time since its previous token is divided equally among them.
        """
        latest, running_ns = self.last_token_ns, self._running_time.running_ns
        num_before = len(self._first_token_ns) + len(self._inter_token_ns)
        for request, num_tokens in new_tokens:
            if not num_tokens:
                continue
            previous_ns = latest.get(request.number)
            latest[request.number] = time_ns
            if previous_ns is None:
                self._first_token_ns.append(running_ns(request.arrival_ns, time_ns))
                self._inter_token_ns += [0] * (num_tokens - 1)
            else:
                self._inter_token_ns += [running_ns(previous_ns, time_ns) // num_tokens] * num_tokens
        return len(self._first_token_ns) + len(self._inter_token_ns) - num_before

    def frame(
        self,
        step: int,
        time_ns: int,
        counters: Counters,
        *,
        requests: RequestUpdates,
        batch: Batch,
        timings: Timings,
        events: tuple[Event, ...],
        moves: Moves,
        work: Work = NO_WORK,
    ) -> Frame:
        """Publish and return the next frame, with all changed rows and new tokens since the last frame."""
        self.seq += 1
        self.step = step
        frame = Frame(
            epoch=self._epoch,
            seq=self.seq,
            step=step,
            time_ns=time_ns,
            blocks=self._ledger.pack(self._take_changed()),
            new_requests=requests.new,
            requests=_pack_requests(requests.changed, requests.unchanged_entries, requests.unchanged_group_entries),
            batch=batch,
            timings=timings,
            counters=counters,
            events=events,
            first_token_ns=pack_u8(self._first_token_ns),
            inter_token_ns=pack_u8(self._inter_token_ns),
            moves=moves,
            work=work,
        )
        self._first_token_ns, self._inter_token_ns = [], []
        if RequestState.FINISHED in frame.requests.state:
            for request in requests.changed:
                if request.state is RequestState.FINISHED:
                    self.last_token_ns.pop(request.number, None)
        self._publish(frame)
        return frame

    def snapshot(
        self,
        hello: Hello,
        time_ns: int,
        counters: Counters,
        requests: Sequence[RequestFacts] = (),
        infos: Iterable[RequestInfo] = (),
        *,
        tag: int = 0,
    ) -> Snapshot:
        """Return the complete state after the last frame. Nothing may have changed since then.

        `requests` and `infos` are the unfinished requests, in the same order.
        """
        tables = {(each.number, group): 0 for each in requests for group, table in enumerate(each.tables) if table}
        return Snapshot(
            hello=hello,
            seq=self.seq,
            step=self.step,
            time_ns=time_ns,
            blocks=self._ledger.pack_all(),
            requests_info=tuple(infos),
            requests=_pack_requests(requests, {}, tables),
            counters=counters,
            tag=tag,
            stops=self._running_time.since(min((request.arrival_ns for request in requests), default=time_ns)),
        )


def pack_batch(
    numbers: Sequence[int], num_tokens: Sequence[int], *, num_decode_tokens: int, num_prefill_tokens: int | None = None
) -> Batch:
    """Pack the requests of a step with their numbers of tokens.

    `num_prefill_tokens`: by default, all tokens that are not decodes.
    """
    return Batch(
        number=pack_u4(numbers),
        num_tokens=pack_u4(num_tokens),
        num_prefill_tokens=sum(num_tokens) - num_decode_tokens if num_prefill_tokens is None else num_prefill_tokens,
        num_decode_tokens=num_decode_tokens,
    )


def _pack_requests(
    requests: Sequence[RequestFacts], tables: Mapping[int, int], groups: Mapping[tuple[int, int], int]
) -> RequestRows:
    """Pack one row per request, and one more for each further KV group with a changed block table."""
    rows: list[RequestFacts] = []
    starts: list[int] = []
    tails: list[Sequence[int]] = []
    row_groups: list[int] = []
    for request in requests:
        number = request.number
        for group, table in enumerate(request.tables):
            start = min(tables.get(number, len(table)), len(table))
            if groups:
                start = min(start, groups.get((number, group), start))
            if not group or number in tables or (number, group) in groups:
                rows.append(request)
                row_groups.append(group)
                starts.append(start)
                tails.append(table[start:])
    if not rows:
        return NO_REQUESTS
    columns = zip(*map(_columns_of, rows), strict=True)
    numbers, state, computed, cached, outputs, preemptions, drafts, accepted, waits = columns
    return RequestRows(
        number=pack_u4(numbers),
        state=bytes(state),
        num_computed_tokens=pack_u4(computed),
        num_cached_tokens=pack_u4(cached),
        num_output_tokens=pack_u4(outputs),
        num_preemptions=struct.pack(f"<{len(rows)}H", *[min(count, MAX_U2) for count in preemptions]),
        table_start=pack_u4(starts),
        table_count=pack_u4([len(tail) for tail in tails]),
        table_blocks=pack_u4([block for tail in tails for block in tail]),
        num_draft_tokens=_pack_if_any(drafts),
        num_accepted_tokens=_pack_if_any(accepted),
        table_group=_pack_if_any(row_groups),
        waits_for=_pack_if_any(waits),
    )


def _pack_if_any(values: Sequence[int]) -> bytes:
    return pack_u4(values) if any(values) else b""
