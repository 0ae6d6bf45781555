"""The cache of an engine other than kvscope's own: a ledger, the requests with their block tables, and pending changes.

Owns the numbering of requests, and the totals. An adapter of the engine changes the state on one thread and requests a
frame after each step. Must not depend on an engine, a socket or a thread. See docs/guide/your-own-engine.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, pack_u4
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import (
    NO_TIMINGS,
    Counters,
    Event,
    Frame,
    Hello,
    Moves,
    RequestInfo,
    Snapshot,
    Timings,
)
from kvscope_telemetry.producer.frame_builder import MAX_U2, FrameBuilder, RequestUpdates, pack_batch


@dataclass(slots=True)
class KnownRequest:
    """An unfinished request.

    After a change of attributes, `CacheState.touch` must be called. Tables are changed with `set_table`.
    """

    info: RequestInfo
    num_groups: int
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waits_for: WaitsFor = WaitsFor.UNKNOWN
    tables: list[list[int]] = field(default_factory=list)
    """Block ids, one list per KV group."""
    unchanged: list[int] = field(default_factory=list)
    """Number of leading entries of each block table that are unchanged since the last frame, one number per KV
    group.
    """
    published: list[int] = field(default_factory=list)  # blocks per table as of the last frame

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.num_groups)]
        self.unchanged, self.published = [0] * self.num_groups, [0] * self.num_groups

    @property
    def number(self) -> int:
        """Number of the request as in the ledger's `owner`."""
        return self.info.number

    @property
    def arrival_ns(self) -> int:
        """Arrival time by `time.monotonic_ns`."""
        return self.info.arrival_ns

    def set_table(self, blocks: Sequence[int], group: int = 0, start: int = 0) -> None:
        """Replace the entries of the block table of `group` from `start` on with `blocks`."""
        self.tables[group][start:] = blocks
        self.unchanged[group] = min(self.unchanged[group], start)

    def set_entry(self, index: int, block: int, group: int = 0) -> None:
        self.tables[group][index] = block
        self.unchanged[group] = min(self.unchanged[group], index)


class CacheState:
    """State of the engine described by `hello`. Initially all blocks are free, except reserved ones."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        cache = hello.cache
        self.ledger = Ledger(cache.num_rows)
        self.ledger.state[: cache.num_reserved_blocks] = BlockState.UNMAPPED
        cache.rows_by_tier.write_tiers(self.ledger)
        self.requests: dict[int, KnownRequest] = {}
        self.totals: dict[str, int] = dict.fromkeys(Counters.__struct_fields__, 0)
        """Values by the field names of `Counters`. `num_running` and `num_waiting` are current numbers; all
        other values are totals since the start.
        """
        self._builder = FrameBuilder(hello.epoch, self.ledger, self._drain_changed)
        self._num_groups = max(1, len(hello.cache.groups))
        self._last_number = 0
        self._new_infos: list[RequestInfo] = []
        self._touched: dict[int, KnownRequest] = {}
        self._changed: list[npt.NDArray[np.uint32]] = []
        self._moves: dict[str, list[int]] = {name: [] for name in Moves.__struct_fields__}
        self._events: list[Event] = []

    @property
    def seq(self) -> int:
        """Number of the last frame; 0 before the first."""
        return self._builder.seq

    @property
    def step(self) -> int:
        return self._builder.step

    # Changes, to be included in the next frame.

    def add_request(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        arrival_ns: int | None = None,
        max_tokens: int = 0,
        priority: int = 0,
        index: int = 0,
        adapter: str = "",
    ) -> KnownRequest:
        """Add a new request. `arrival_ns` is a time by `time.monotonic_ns`; None means the current time."""
        self._last_number += 1
        info = RequestInfo(
            number=self._last_number,
            request_id=request_id,
            arrival_ns=time.monotonic_ns() if arrival_ns is None else arrival_ns,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            priority=priority,
            index=index,
            adapter=adapter,
        )
        request = self.requests[info.number] = KnownRequest(info, self._num_groups)
        self._new_infos.append(info)
        self.touch(request)
        return request

    def touch(self, request: KnownRequest) -> None:
        """Include the request in the next frame."""
        self._touched[request.number] = request

    def set_earlier_tokens(self, request: KnownRequest, num_outputs: int, time_ns: int) -> None:
        """Set the number of output tokens that the request had when observation began, at `time_ns`. The
        latency of the next token is measured from that time.
        """
        request.num_output_tokens = num_outputs
        if num_outputs:
            self._builder.last_token_ns[request.number] = time_ns

    def set_num_output_tokens(self, request: KnownRequest, num_outputs: int, time_ns: int) -> None:
        """Set the number of output tokens at `time_ns`. The new tokens are added to the totals, and their
        latencies are recorded.
        """
        num_new, request.num_output_tokens = num_outputs - request.num_output_tokens, num_outputs
        if num_new > 0:
            self.count(generation_tokens=self._builder.count_tokens([(request, num_new)], time_ns))
            self.touch(request)

    def finish(self, request: KnownRequest) -> None:
        """Remove a request that ended, and clear its block tables. The caller must update the ledger's rows."""
        request.state = RequestState.FINISHED
        for group in range(self._num_groups):
            request.set_table((), group)
        self.requests.pop(request.number, None)
        self.touch(request)

    def set_blocks(self, ids: npt.ArrayLike, **columns: npt.ArrayLike) -> None:
        """Write columns of the ledger by name for blocks `ids`, shape (n,). Values are scalars or have shape (n,).

        If an id occurs several times, its last value is used.
        """
        rows = np.asarray(ids, np.uint32)
        if rows.size:
            for name, values in columns.items():
                getattr(self.ledger, name)[rows] = values
            self._changed.append(rows)

    def free_blocks(self, ids: npt.ArrayLike) -> None:
        self.set_blocks(
            ids, state=BlockState.FREE, ref_count=0, filled=0, owner=NO_OWNER, prefix_hits=0, hash=0, parent=0, group=0
        )

    def more_hits(self, ids: npt.ArrayLike, added: npt.NDArray[np.bool_] | int = 1) -> npt.NDArray[np.uint32]:
        """Return the blocks' `prefix_hits` plus `added`, saturated at the column's maximum."""
        hits = self.ledger.prefix_hits[np.asarray(ids, np.int64)].astype(np.uint32) + np.asarray(added, np.uint32)
        return np.minimum(hits, np.uint32(MAX_U2))

    def begin_read(self, ids: npt.ArrayLike, step: int) -> None:
        """Mark blocks of a lower tier as being loaded for a prefix hit, and add a reference to each."""
        refs = self.ledger.ref_count[np.asarray(ids, np.int64)] + 1
        hits = self.more_hits(ids)
        self.set_blocks(ids, state=BlockState.ACTIVE, ref_count=refs, prefix_hits=hits, last_used_step=step)

    def end_read(self, ids: npt.ArrayLike, step: int) -> None:
        """Remove the reference that `begin_read` added to blocks."""
        refs = np.maximum(self.ledger.ref_count[np.asarray(ids, np.int64)] - 1, 0)
        state = np.where(refs > 0, BlockState.ACTIVE, BlockState.CACHED)
        self.set_blocks(ids, state=state, ref_count=refs, last_used_step=step)

    def add_moves(self, kind: str, ids: Iterable[int]) -> None:
        """Add blocks to the field `kind` of the next frame's `Moves`."""
        self._moves[kind] += ids

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def count(self, **added: int) -> None:
        """Add amounts to the totals, given by the field names of `Counters`."""
        for name, number in added.items():
            self.totals[name] += number

    # Output: frames and snapshots.

    def frame(
        self,
        step: int,
        time_ns: int,
        *,
        batch: Mapping[int, int] | None = None,
        num_decode_tokens: int = 0,
        num_prefill_tokens: int | None = None,
        timings: Timings | None = None,
    ) -> Frame:
        """Return a frame with all changes since the last one.

        Args:
            batch: Number of tokens computed per request, by request number.
            num_prefill_tokens: Number of prefill tokens in `batch`. None means all tokens that are not decodes.
        """
        batch_tokens = batch or {}
        requests = list(self._touched.values())
        unchanged = {
            (request.number, group): start
            for request in requests
            for group, start in enumerate(request.unchanged)
            if start < max(len(request.tables[group]), request.published[group])
        }
        frame = self._builder.frame(
            step,
            time_ns,
            self.counters(),
            requests=RequestUpdates(tuple(self._new_infos), requests, unchanged_group_entries=unchanged),
            batch=pack_batch(
                list(batch_tokens),
                list(batch_tokens.values()),
                num_decode_tokens=num_decode_tokens,
                num_prefill_tokens=num_prefill_tokens,
            ),
            timings=timings or NO_TIMINGS,
            events=tuple(self._events),
            moves=Moves(**{name: pack_u4(blocks) for name, blocks in self._moves.items()}),
        )
        for request in requests:
            request.unchanged = list(map(len, request.tables))
            request.published = list(request.unchanged)
        self._new_infos, self._touched, self._events = [], {}, []
        self._moves = {name: [] for name in self._moves}
        return frame

    def snapshot(self, tag: int = 0, time_ns: int | None = None) -> Snapshot:
        """Return the whole state with the sequence number of the last frame. Nothing may have changed since that frame.

        `time_ns` is a time by `time.monotonic_ns`; None means the current time.
        """
        requests = list(self.requests.values())
        now_ns = time.monotonic_ns() if time_ns is None else time_ns
        infos = [request.info for request in requests]
        return self._builder.snapshot(self.hello, now_ns, self.counters(), requests, infos, tag=tag)

    def counters(self) -> Counters:
        return Counters(**self.totals)

    def _drain_changed(self) -> npt.NDArray[np.uint32]:
        """Return the rows that changed since the last call, each once, ascending."""
        changed, self._changed = self._changed, []
        return np.unique(np.concatenate(changed)) if changed else np.empty(0, np.uint32)
