"""Records what SGLang's scheduler does, on the scheduler's thread.

A record contains a tuple for each event, host-side numbers of each step and, at most `COPIES_PER_S` times per second, a
copy of page tables (`pages`). Owns the hooks, and decides which attributes of SGLang's objects are read and which table
rows are read again. It reads no device and does not block; the publishing thread (`sglang_translator`) does everything
else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang.eviction_beneficiary import EvictedCounts, EvictionBeneficiary
from kvscope_inside.sglang.host_tier import HostPageEvent, hook_host_tier, host_tier_of
from kvscope_inside.sglang.pages import Copy, PageSpan, Reader
from kvscope_inside.sglang.pools import full_allocator, pools_of
from kvscope_telemetry.messages.telemetry import Timings

COPIES_PER_S: Final = 20
"""Maximum number of copies of page tables per second while steps run."""
HostEvent = tuple[Any, ...]
"""An event: its kind and the arguments of its handler, such as ("added", request) or ("scheduled", request, prefix)."""


class LaunchedBatch(NamedTuple):
    requests: list[Any]
    num_tokens: list[int]
    is_prefill: bool
    schedule_ns: int
    launched_ns: int


class Row(NamedTuple):
    """Table row of a request in a copy of page tables. The copy contains the ids of the request's pages `first`
    to `end` (exclusive).
    """

    request: Any
    first: int
    end: int
    published: int
    """Number of the request's leading pages that are in the radix tree."""
    num_tokens: int
    """Number of tokens whose KV is in the request's pages, or will be after the steps in flight."""
    is_last: bool = False
    """Whether the request has ended and will not get another table row."""

    @property
    def num_entries(self) -> int:
        return self.end - self.first

    def dropped(self) -> Row:
        """Return the row without its request. Its page ids are then ignored, because the cache was emptied."""
        return self._replace(request=None)


class Pages(NamedTuple):
    released: list[Row | HostPageEvent]
    """Table rows that requests released, and events of host pages, in order."""
    rows: list[Row]
    copy: Copy
    is_whole: bool
    """Whether the copy contains all changes, so that none is left for the next copy."""
    table_rows: list[tuple[Any, int]]
    """Requests, each with the index of its row in SGLang's table; empty for a model without recurrent states."""


class SglangRecord(NamedTuple):
    """Events since the previous record, in order, and the state of the scheduler after them."""

    time_ns: int
    events: list[HostEvent]
    ran: LaunchedBatch | None
    """The batch whose results arrived; None for a record between two steps."""
    computed: list[int]
    """Number of computed tokens of each request in the batch."""
    num_outputs: list[int]
    draft_counts: list[tuple[int, int]]
    """For each request of the batch, its total number of speculative steps and of accepted draft tokens; empty
    without speculative decoding.
    """
    ended: list[tuple[Any, Any]]
    """Requests that ended in the step, each with SGLang's finish reason."""
    pages: Pages | None
    timings: Timings | None
    """Durations of the step and of making the previous record; None for a record between two steps."""


class _Holder:
    __slots__ = ("num_read", "num_tokens", "published", "request")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.num_read = self.published = self.num_tokens = 0
        """Number of the request's pages that were read. `published` is the number of its pages in the radix
        tree, `num_tokens` the number of tokens in its pages.
        """


class SglangRecorder:
    """Hooks on one scheduler, installed on construction. They append to `records`, from which the publishing thread
    pops.

    `between_steps` is called on the scheduler's thread before the scheduler polls for requests.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, reader: Reader, between_steps: Callable[[], None]) -> None:
        self.records: deque[SglangRecord] = deque()
        self.scheduler = scheduler
        self.step_started_ns = 0
        self.no_copy_before_ns = 0
        """Earliest monotonic time of the next copy. The publishing thread sets it, to limit the time in which
        it holds the interpreter lock (GIL) that the scheduler needs.
        """
        self._reader, self._between_steps = reader, between_steps
        pools = pools_of(scheduler)
        self._page_size, self._has_states = pools.page_size, pools.states is not None
        self._has_host_pages = pools.num_host_pages > 0
        self._is_speculative = bool(getattr(scheduler.server_args, "speculative_algorithm", None))
        self._events: list[HostEvent] = []
        self._holders: dict[int, _Holder] = {}
        self._releasing: list[tuple[Row, int]] = []
        """Released table rows, each with its index in SGLang's table. The table's entries remain until another
        request gets the row.
        """
        self._released: list[Row | HostPageEvent] = []
        self._launched: deque[LaunchedBatch] = deque()
        self._has_changed = True
        """Whether pages may have changed since the last copy."""
        self._has_evicted = False
        """Whether a cached page was evicted since the last copy."""
        self._copied_ns = self._schedule_ns = self._schedule_started_ns = self._commit_started_ns = (
            self._recording_ns
        ) = 0
        self._beneficiary = EvictionBeneficiary(scheduler, hooks, self._evicted)
        self._install_hooks(hooks)

    def _install_hooks(self, hooks: Hooks) -> None:
        scheduler, cache, table = self.scheduler, self.scheduler.tree_cache, self.scheduler.req_to_token_pool
        hooks.before(scheduler, "ingest_requests", lambda *_, **__: self._between_steps())
        hooks.before(scheduler, "get_next_batch_to_run", self._before_schedule)
        hooks.after(scheduler, "get_next_batch_to_run", self._after_schedule)
        hooks.before(scheduler, "run_batch", self._before_run_batch)
        hooks.before(scheduler, "process_batch_result", self._before_results)
        hooks.after(scheduler, "process_batch_result", self._after_results)
        hooks.before(scheduler, "on_idle", self._on_idle)
        hooks.after(scheduler, "_add_request_to_queue", self._added)
        hooks.after(scheduler, "send_abort_output", self._aborted)
        hooks.before(table, "alloc", self._before_allocate_rows)
        hooks.after(table, "alloc", self._allocated_rows)
        hooks.before(table, "free", self._before_free_row)
        hooks.after(cache, "reset", self._flushed)
        if self._has_host_pages and (tier := host_tier_of(scheduler)) is not None:
            hook_host_tier(hooks, tier, self._host_pages_changed)

    # Called on the scheduler's thread.

    def _before_schedule(self, *_: Any, **__: Any) -> None:
        self._schedule_started_ns = time.monotonic_ns()

    def _after_schedule(self, plan: Any, *_: Any, **__: Any) -> None:
        self._beneficiary.clear()
        self._schedule_ns = time.monotonic_ns() - self._schedule_started_ns

    def _before_run_batch(self, batch: Any, *_: Any, **__: Any) -> None:
        requests, mode = list(batch.reqs), batch.forward_mode
        extend_lens = batch.extend_lens if mode.is_extend() else None
        if extend_lens is not None and len(extend_lens) == len(requests):
            for request, prefix in zip(requests, batch.prefix_lens, strict=True):
                self._events.append(("scheduled", request, prefix, getattr(request, "host_loaded_length", 0)))
            num_tokens = list(extend_lens)
        else:
            extend_lens, num_tokens = None, [1] * len(requests)
        now_ns = time.monotonic_ns()
        self._launched.append(LaunchedBatch(requests, num_tokens, extend_lens is not None, self._schedule_ns, now_ns))
        self.step_started_ns = self.step_started_ns or now_ns
        self._has_changed = True

    def _before_results(self, *_: Any, **__: Any) -> None:
        self._commit_started_ns = time.monotonic_ns()

    def _after_results(self, result: Any, batch: Any, *_: Any, **__: Any) -> None:
        self._beneficiary.clear()
        ran = None
        while self._launched and ran is None:
            ran = self._launched.popleft()
            if ran.requests and batch.reqs and ran.requests[0] is not batch.reqs[0]:
                ran = None  # its results never arrived
        self._has_changed = True
        self._record(ran)

    def _on_idle(self, *_: Any, **__: Any) -> None:
        self._launched.clear()
        self.step_started_ns = 0
        if self._events or (self._has_changed and self._reader.can_copy()):
            self._record(None, is_idle=True)

    def _added(self, result: Any, request: Any, *_: Any, **__: Any) -> None:
        if any(each is request for each in reversed(self.scheduler.waiting_queue)):
            num_retractions = int(getattr(request, "retraction_count", 0))
            now_ns = time.monotonic_ns()
            num_free = full_allocator(self.scheduler).available_size()
            self._events.append(
                (
                    "added",
                    request,
                    now_ns,
                    num_retractions,
                    num_free,
                    self._beneficiary.first_uncovered() if num_retractions else None,
                )
            )

    def _aborted(self, result: Any, message: Any, request: Any, *_: Any, **__: Any) -> None:
        self._events.append(("aborted", request, len(request.output_ids)))

    def _evicted(self, evicted: EvictedCounts) -> None:
        self._has_changed = self._has_evicted = True
        self._events.append(("evicted", evicted))

    def _flushed(self, *_: Any, **__: Any) -> None:
        self._releasing, self._has_changed = [], True
        self._released = [each.dropped() for each in self._released]
        self._holders.clear()
        self._events.append(("flushed",))

    def _host_pages_changed(self, event: HostPageEvent, slots: Any) -> None:
        self._has_changed = True
        event = event._replace(is_unchanged=event.is_unchanged or not self._has_evicted)
        if slots is not None:
            self._gather_released()
            if event.num_entries <= self._reader.num_entries_left():
                self._reader.gather_slots(slots)
            else:
                event = event._replace(num_entries=0)
        self._released.append(event)

    # Rows of the table.

    def _before_allocate_rows(self, *_: Any, **__: Any) -> None:
        self._gather_released()

    def _allocated_rows(self, result: Any, requests: Any, *_: Any, **__: Any) -> None:
        if result is not None:
            for request in requests:
                if id(request) not in self._holders:
                    self._holders[id(request)] = _Holder(request)

    def _before_free_row(self, request: Any, *_: Any, **__: Any) -> None:
        """Record the released table row of `request`. The pages that the radix tree retains must be read before
        another request gets the row.
        """
        holder = self._holders.pop(id(request), None)
        if holder is None:
            return
        kv = request.kv
        published = int(kv.cache_protected_len) // self._page_size
        first = min(holder.num_read, holder.published, published)
        row = Row(request, first, published, published, 0, request.finished_reason is not None)
        self._releasing.append((row, int(kv.req_pool_idx)))
        self._has_changed = True

    def _gather_released(self) -> None:
        if not self._releasing:
            return
        spans, num_left = [], self._reader.num_entries_left()
        for row, row_index in self._releasing:
            if row.end - row.first > num_left:
                row = row._replace(first=row.end)  # too many: these stay unknown
            num_left -= row.end - row.first
            spans.append(PageSpan(row_index, row.first, row.end))
            self._released.append(row)
        self._releasing = []
        self._reader.gather(spans)

    def _pages(self) -> Pages | None:
        if not self._reader.can_copy():
            return None
        self._gather_released()
        num_left, size, is_whole = self._reader.num_entries_left(), self._page_size, True
        rows: list[Row] = []
        spans: list[PageSpan] = []
        for key, holder in list(self._holders.items()):
            kv = holder.request.kv
            row_index, num_tokens = kv.req_pool_idx, kv.kv_committed_len
            if row_index is None:  # a session keeps its row
                del self._holders[key]
                self._released.append(Row(holder.request, 0, 0, 0, 0))
                continue
            published, end = kv.cache_protected_len // size, -(-kv.kv_allocated_len // size)
            first = holder.num_read
            if published != holder.published:  # these may be other pages now, which the tree had already
                first = min(first, holder.published)
            if end - first > num_left:
                end, is_whole = first + num_left, False
            published = min(published, end)
            if first == end and published == holder.published and num_tokens == holder.num_tokens:
                continue
            num_left -= end - first
            spans.append(PageSpan(row_index, first, end))
            rows.append(Row(holder.request, first, end, published, num_tokens))
            holder.num_read, holder.published, holder.num_tokens = end, published, num_tokens
        if spans:
            self._reader.gather(spans)
        released, self._released = self._released, []
        self._has_changed, self._has_evicted = not is_whole, False
        table_rows = [(each.request, int(each.request.kv.req_pool_idx)) for each in self._holders.values()]
        return Pages(released, rows, self._reader.copy(), is_whole, table_rows if self._has_states else [])

    def _record(self, ran: LaunchedBatch | None, *, is_idle: bool = False) -> None:
        now_ns = time.monotonic_ns()
        events, self._events = self._events, []
        pages, requests = None, ran.requests if ran is not None else []
        due_ns = max(self._copied_ns + 1_000_000_000 // COPIES_PER_S, self.no_copy_before_ns)
        if self._has_changed and (is_idle or now_ns >= due_ns):
            pages = self._pages()
            self._copied_ns = now_ns
        self.records.append(
            SglangRecord(
                now_ns,
                events,
                ran,
                [request.kv.kv_committed_len for request in requests],
                [len(request.output_ids) for request in requests],
                [(request.spec_verify_ct, request.spec_num_correct_drafts) for request in requests]
                if self._is_speculative
                else [],
                [(request, request.finished_reason) for request in requests if request.finished_reason is not None],
                pages,
                None if ran is None else self._timings(ran, now_ns),
            )
        )
        if ran is not None:
            self.step_started_ns = self._launched[0].launched_ns if self._launched else 0
        self._recording_ns = time.monotonic_ns() - now_ns

    def _timings(self, ran: LaunchedBatch, now_ns: int) -> Timings:
        run_ns = self._commit_started_ns - ran.launched_ns
        return Timings(ran.schedule_ns, run_ns, 0, now_ns - self._commit_started_ns, self._recording_ns)
