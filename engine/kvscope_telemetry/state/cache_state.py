"""The cache of an engine, as it is told: a ledger, the requests with their block tables, and what of it is new.

Owns the numbers of requests, of frames and of totals. Whoever knows an engine changes it, on one thread, and makes a
frame of each step; it knows no engine, no socket and no thread. Docs: docs/guide/your-own-engine.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, pack_u4, pack_u8
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import (
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
)

_MAX_U2 = (1 << 16) - 1


@dataclass(slots=True)
class KnownRequest:
    """A request that is not finished. Write its figures, then `CacheState.touch` it; tables by `set_table`."""

    info: RequestInfo
    num_groups: int
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waits_for: WaitsFor = WaitsFor.UNTOLD
    last_token_ns: int = 0
    """When its newest token came; 0 before the first."""
    tables: list[list[int]] = field(default_factory=list)
    """Block ids, one list a KV group."""
    unchanged: list[int] = field(default_factory=list)
    """How many entries of each table are as they were told, of how many."""
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.num_groups)]
        self.unchanged, self.told = [0] * self.num_groups, [0] * self.num_groups

    @property
    def number(self) -> int:
        """As the ledger's `owner` has it."""
        return self.info.number

    def set_table(self, blocks: Sequence[int], group: int = 0, start: int = 0) -> None:
        """From entry `start` on the block table of `group` is `blocks`."""
        self.tables[group][start:] = blocks
        self.unchanged[group] = min(self.unchanged[group], start)

    def set_entry(self, place: int, block: int, group: int = 0) -> None:
        """One entry is another block."""
        self.tables[group][place] = block
        self.unchanged[group] = min(self.unchanged[group], place)


class CacheState:
    """Of the engine that `hello` is about; all blocks free at first, the reserved ones apart."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        cache = hello.cache
        self.ledger = Ledger(cache.num_rows)
        self.ledger.state[: cache.num_reserved_blocks] = BlockState.UNMAPPED
        for tier, rows in cache.rows_by_tier.items():
            self.ledger.tier[rows.start : rows.stop] = tier
        self.requests: dict[int, KnownRequest] = {}
        self.totals: dict[str, int] = dict.fromkeys(Counters.__struct_fields__, 0)
        """By the names of `Counters`; those that begin with `num_` are how it is now."""
        self.seq = self.step = 0
        self._num_groups = max(1, len(hello.cache.groups))
        self._last_number = 0
        self._new: list[RequestInfo] = []
        self._touched: dict[int, KnownRequest] = {}
        self._changed: list[npt.NDArray[np.uint32]] = []
        self._moves: dict[str, list[int]] = {name: [] for name in Moves.__struct_fields__}
        self._events: list[Event] = []
        self._first_token_ns: list[int] = []
        self._inter_token_ns: list[int] = []

    # What happened.

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
        """A request came. `arrival_ns` is by `time.monotonic_ns`, now unless told otherwise."""
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
        self._new.append(info)
        self.touch(request)
        return request

    def touch(self, request: KnownRequest) -> None:
        """Its figures or tables changed."""
        self._touched[request.number] = request

    def tokens_came(self, request: KnownRequest, num_outputs: int, time_ns: int) -> None:
        """Its answer has so many tokens now: the new ones are counted, and how long they took is told. Those that came
        at once share the time since the one before."""
        num_new, request.num_output_tokens = num_outputs - request.num_output_tokens, num_outputs
        if num_new <= 0:
            return
        self.count(generation_tokens=num_new)
        if request.last_token_ns:
            self._inter_token_ns += [max(0, time_ns - request.last_token_ns) // num_new] * num_new
        else:
            self._first_token_ns.append(max(0, time_ns - request.info.arrival_ns))
            self._inter_token_ns += [0] * (num_new - 1)
        request.last_token_ns = time_ns
        self.touch(request)

    def finish(self, request: KnownRequest) -> None:
        """It ended and holds no block; what its blocks are now is for the caller to say."""
        request.state = RequestState.FINISHED
        for group in range(self._num_groups):
            request.set_table((), group)
        self.requests.pop(request.number, None)
        self.touch(request)

    def set_blocks(self, ids: npt.ArrayLike, **columns: npt.ArrayLike) -> None:
        """Write columns of the ledger, by their names, for blocks `ids`, shape (n,); values of shape (n,) or one.

        Of an id that occurs several times the last stands.
        """
        at = np.asarray(ids, np.uint32)
        if at.size:
            for name, values in columns.items():
                getattr(self.ledger, name)[at] = values
            self._changed.append(at)

    def free_blocks(self, ids: npt.ArrayLike) -> None:
        """These blocks hold nothing any more."""
        self.set_blocks(
            ids, state=BlockState.FREE, ref_count=0, filled=0, owner=NO_OWNER, prefix_hits=0, hash=0, parent=0, group=0
        )

    def more_hits(self, ids: npt.ArrayLike, added: npt.NDArray[np.bool_] | int = 1) -> npt.NDArray[np.uint32]:
        """How often prompts found these blocks, `added` more, as far as the ledger counts."""
        hits = self.ledger.prefix_hits[np.asarray(ids, np.int64)].astype(np.uint32) + np.asarray(added, np.uint32)
        return np.minimum(hits, np.uint32(_MAX_U2))

    def begin_read(self, ids: npt.ArrayLike, step: int) -> None:
        """These blocks of a lower tier are loaded: a prompt found them, and they are held meanwhile."""
        refs = self.ledger.ref_count[np.asarray(ids, np.int64)] + 1
        hits = self.more_hits(ids)
        self.set_blocks(ids, state=BlockState.ACTIVE, ref_count=refs, prefix_hits=hits, last_used_step=step)

    def end_read(self, ids: npt.ArrayLike, step: int) -> None:
        """One that held them so does no more."""
        refs = np.maximum(self.ledger.ref_count[np.asarray(ids, np.int64)] - 1, 0)
        state = np.where(refs > 0, BlockState.ACTIVE, BlockState.CACHED)
        self.set_blocks(ids, state=state, ref_count=refs, last_used_step=step)

    def add_moves(self, kind: str, ids: Iterable[int]) -> None:
        """Blocks moved: `kind` is a field of `Moves`."""
        self._moves[kind] += ids

    def add_event(self, event: Event) -> None:
        """Told with the next frame."""
        self._events.append(event)

    def count(self, **added: int) -> None:
        """Add to totals, by the names of `Counters`."""
        for name, number in added.items():
            self.totals[name] += number

    # What is told.

    @property
    def has_changed(self) -> bool:
        """Whether the next frame has something to say."""
        return bool(self._touched or self._changed or self._events)

    def frame(
        self,
        step: int,
        time_ns: int,
        *,
        batch: Mapping[int, int] | None = None,
        num_decode_tokens: int = 0,
        num_prefill_tokens: int | None = None,
        timings: Timings | None = None,
        first_token_ns: Sequence[int] = (),
        inter_token_ns: Sequence[int] = (),
    ) -> Frame:
        """All that changed since the last one. `batch`: how many tokens ran of each request, by number; those that are
        no decodes are prefill, unless that is told."""
        ran = batch or {}
        if num_prefill_tokens is None:
            num_prefill_tokens = sum(ran.values()) - num_decode_tokens
        self.seq += 1
        self.step = step
        ids = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.uint32)
        frame = Frame(
            epoch=self.hello.epoch,
            seq=self.seq,
            step=step,
            time_ns=time_ns,
            blocks=self.ledger.pack(ids),
            new_requests=tuple(self._new),
            requests=_rows_of(list(self._touched.values())),
            batch=Batch(
                number=pack_u4(list(ran)),
                num_tokens=pack_u4(list(ran.values())),
                num_prefill_tokens=num_prefill_tokens,
                num_decode_tokens=num_decode_tokens,
            ),
            timings=timings or Timings(),
            counters=self.counters(),
            events=tuple(self._events),
            first_token_ns=pack_u8([*self._first_token_ns, *first_token_ns]),
            inter_token_ns=pack_u8([*self._inter_token_ns, *inter_token_ns]),
            moves=Moves(**{name: pack_u4(blocks) for name, blocks in self._moves.items()}),
        )
        for request in self._touched.values():
            request.unchanged = list(map(len, request.tables))
            request.told = list(request.unchanged)
        self._new, self._touched, self._changed, self._events = [], {}, [], []
        self._first_token_ns, self._inter_token_ns = [], []
        self._moves = {name: [] for name in self._moves}
        return frame

    def snapshot(self, tag: int = 0) -> Snapshot:
        """The whole state after the last frame; only while nothing changed since."""
        requests = list(self.requests.values())
        return Snapshot(
            hello=self.hello,
            seq=self.seq,
            step=self.step,
            time_ns=time.monotonic_ns(),
            blocks=self.ledger.pack_all(),
            requests_info=tuple(request.info for request in requests),
            requests=_rows_of(requests, whole=True),
            counters=self.counters(),
            tag=tag,
        )

    def counters(self) -> Counters:
        """As they are now."""
        return Counters(**self.totals)


def _rows_of(requests: Sequence[KnownRequest], *, whole: bool = False) -> RequestRows:
    """A row a request, and one more for each further table that changed, or is not empty where all is told."""
    rows: list[tuple[KnownRequest, int, int, list[int]]] = []
    for request in requests:
        for group, table in enumerate(request.tables):
            start = 0 if whole else request.unchanged[group]
            if group == 0 or start < len(table) or (not whole and len(table) < request.told[group]):
                rows.append((request, group, start, table[start:]))
    if not rows:
        return RequestRows()

    def column(name: str) -> list[int]:
        return [getattr(request, name) for request, _, _, _ in rows]

    return RequestRows(
        number=pack_u4([request.number for request, _, _, _ in rows]),
        state=bytes(column("state")),
        num_computed_tokens=pack_u4(column("num_computed_tokens")),
        num_cached_tokens=pack_u4(column("num_cached_tokens")),
        num_output_tokens=pack_u4(column("num_output_tokens")),
        num_preemptions=np.minimum(column("num_preemptions"), _MAX_U2).astype("<u2").tobytes(),
        table_start=pack_u4([start for _, _, start, _ in rows]),
        table_count=pack_u4([len(tail) for _, _, _, tail in rows]),
        table_blocks=pack_u4([block for _, _, _, tail in rows for block in tail]),
        num_draft_tokens=_u4_if_any(column("num_draft_tokens")),
        num_accepted_tokens=_u4_if_any(column("num_accepted_tokens")),
        table_group=_u4_if_any([group for _, group, _, _ in rows]),
        waits_for=_u4_if_any(column("waits_for")),
    )


def _u4_if_any(values: list[Any]) -> bytes:
    return pack_u4(values) if any(values) else b""
