"""Translates the activity of a host engine to ledger rows, requests and events with causes.

A host module derives from `Translator`. It reads the records that the host's hooks made and calls a method for each
change: this module's for requests (started, preempted, finished), those of `block_updates` for blocks (allocated, hit
by a prompt, cached, evicted), and those of `event_reporter` for events. Only these three modules decide how a change
affects the ledger, the counters and the requests, and which event with which text is published.

Runs on the publishing thread, so it reads only host objects that are immutable or append-only.

See docs/internals/decisions/0026-one-translator-for-all-hosts.md.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from kvscope_inside.block_updates import BlockUpdates, StepChanges
from kvscope_inside.cached_texts import BlockNotes, CachedText, CachedTexts
from kvscope_inside.event_reporter import EventReporter
from kvscope_inside.evicted_hashes import EvictedHashes
from kvscope_inside.host_request import HostRequest
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.event_kinds import aborted_text, finished_text
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import EventData, Frame, Timings
from kvscope_telemetry.producer.cache_state import CacheState


class HostRecord(Protocol):
    """Record of the host engine's activity since the previous record, made on the host's thread; usually one step."""

    @property
    def time_ns(self) -> int:
        """Time of recording (`time.monotonic_ns`)."""

    @property
    def timings(self) -> Timings | None:
        """Durations of the step; None for a record between two steps."""


Request = TypeVar("Request", bound=HostRequest)


class StepCounts(NamedTuple):
    num_running: int
    num_waiting: int
    batch: Mapping[int, int] = {}
    """Map from a request number to the number of tokens that the request ran in the step."""
    num_decode_tokens: int = 0


class PrefixMiss(NamedTuple):
    """Reason why a prompt's prefix hit ended, and the position at which it ended: the values of
    `EventData.missed`, `missed_token` and `missed_step`.
    """

    kind: str = ""
    token: int = 0
    step: int = 0


class MissedBlock(NamedTuple):
    """The first block of a prompt that was not cached."""

    hashes: tuple[int, ...]
    """Hashes of the block in the ledger's format, one for each KV group that may have evicted it."""
    parent: int
    """Hash of the preceding block; 0 for the first block of a prompt."""
    is_cached: bool = False
    """Whether the block itself is cached. The prefix hit then ended before it because a block of another KV
    group was missing.
    """


class Translator(ABC, Generic[Request]):
    """Applies the records of one host engine to `state`, in order."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.handlers: Mapping[str, Callable[..., object]] = {}
        """Map from an event kind to the method that `dispatch` calls. Set by the host module."""
        self.requests: dict[Any, Request] = {}
        """Requests by a key that the host module chooses."""
        self.texts = CachedTexts()
        self.evicted_hashes = EvictedHashes()
        self.step = StepChanges()
        self.blocks = BlockUpdates(state, self.step, self.texts, self.evicted_hashes)
        self.events = EventReporter(state, self.step)
        self.block_size = state.hello.cache.block_size
        self.block_sizes = state.hello.cache.block_sizes
        self.num_reserved = state.hello.cache.num_reserved_blocks
        self._waiting: dict[int, Request] = {}
        """Requests for which a wait reason is published, by number."""

    # Defined by host modules.

    @abstractmethod
    def convert(self, record: Any) -> StepCounts:
        """Apply the changes in `record` to `state`, using the methods of this class, `blocks` and `events`."""

    @abstractmethod
    def request_tokens(self, request: Request, start: int, end: int) -> Sequence[int]:
        """Return tokens `start` to `end` (exclusive) of a request's prompt and answer, or fewer if they do not exist
        yet.
        """

    def request_key(self, request: Request) -> tuple[str, str]:
        return "", ""

    def request_notes(self, request: Request, start: int, count: int) -> BlockNotes:
        """Return pairs of name and value that describe `count` tokens of a request from position `start` on,
        such as images.
        """
        return ()

    def missed_block(self, request: Request, token: int) -> MissedBlock | None:
        """Return the block of a prompt that begins at token position `token`; None if its hash is unknown."""
        return None

    def block_span(self, request: Request, group: int, entry: int, row: int) -> tuple[int, int]:
        """Return the token positions at which a block of a request's table begins and ends (exclusive)."""
        start = entry * self.block_sizes[group]
        return start, start + int(self.state.ledger.filled[row])

    def blocks_written(self, request: Request, before: int, after: int) -> Iterator[tuple[int, int]]:
        """Yield the ledger row and the number of tokens of each block that changed when the number of computed
        tokens went from `before` to `after`.
        """
        low, high = sorted((before, after))
        for table, size in zip(request.known.tables, self.block_sizes, strict=True):
            for entry in range(low // size, min(-(-high // size), len(table))):
                if table[entry] >= self.num_reserved:
                    yield table[entry], min(max(after - entry * size, 0), size)

    # One record.

    def apply(self, record: HostRecord) -> Frame:
        state = self.state
        self.step.start(state.step + (record.timings is not None), record.time_ns)
        progress = self.convert(record)
        state.totals["num_running"], state.totals["num_waiting"] = progress.num_running, progress.num_waiting
        state.add_moves("evicted", self.step.evicted)
        return state.frame(
            self.step.number,
            record.time_ns,
            batch=progress.batch,
            num_decode_tokens=progress.num_decode_tokens,
            timings=record.timings,
        )

    def dispatch(self, events: Iterable[tuple[Any, ...]]) -> None:
        for kind, *arguments in events:
            self.handlers[kind](*arguments)

    # Requests.

    def request_by_number(self, number: int) -> Request | None:
        """Return the request with this number in the ledger; None if it has ended."""
        return next((request for request in self.requests.values() if request.known.number == number), None)

    def arrival_ns(self, waited_s: float) -> int:
        """Return the monotonic time of arrival of a request that has waited for `waited_s` seconds."""
        return max(0, min(self.step.time_ns, time.monotonic_ns() - int(max(0.0, waited_s) * 1e9)))

    def start_request(
        self,
        request: Request,
        *,
        time_ns: int,
        num_cached_tokens: int,
        num_blocks: int,
        num_pool_blocks: int,
        num_loaded_blocks: int = 0,
        num_states: int = 0,
        num_computed_tokens: int | None = None,
    ) -> None:
        """Publish that a request was scheduled for the first time, or again after a preemption.

        Args:
            num_cached_tokens: Tokens of the request that need not be computed.
            num_pool_blocks: Blocks of the pool with cached tokens.
            num_loaded_blocks: Blocks of cached tokens that are loaded from a lower tier.
            num_computed_tokens: Number of cached tokens whose blocks are already in the request's block table; None if
                this holds for all cached tokens.
        """
        known, num_prompt = request.known, request.known.info.num_prompt_tokens
        num_known = num_prompt + known.num_output_tokens
        is_resumed = request.was_admitted and known.num_preemptions > 0
        if is_resumed:
            num_recomputed = max(0, num_known - num_cached_tokens)
            self.state.count(restored_tokens=num_cached_tokens, recomputed_tokens=num_recomputed)
        else:
            self.count_admission(request, num_cached_tokens)
        request.was_admitted, known.state = True, RequestState.RUNNING
        known.num_computed_tokens = num_cached_tokens if num_computed_tokens is None else num_computed_tokens
        missed = self.explain_miss(request, num_cached_tokens, num_known)
        self.events.report(
            "resumed" if is_resumed else "admitted",
            time_ns=time_ns,
            number=known.number,
            num_blocks=num_blocks,
            num_tokens=num_cached_tokens,
            data=EventData(
                kind="started",
                waited_ns=max(0, time_ns - request.waiting_since_ns),
                num_known_tokens=num_known,
                num_pool_blocks=max(0, num_pool_blocks),
                num_loaded_blocks=num_loaded_blocks,
                missed=missed.kind,
                missed_token=missed.token,
                missed_step=missed.step,
                num_states=num_states,
            ),
        )
        self.state.touch(known)

    def count_admission(self, request: Request, num_cached_tokens: int) -> None:
        num_prompt = request.known.info.num_prompt_tokens
        request.known.num_cached_tokens = num_cached_tokens
        self.state.count(
            admitted=1,
            prompt_tokens=max(0, num_prompt - num_cached_tokens),
            cached_tokens=min(num_cached_tokens, num_prompt),
        )

    def update_progress(self, progress: Iterable[tuple[Request, int, int]]) -> None:
        """Publish the progress of running requests.

        `progress`: for each request, the number of tokens whose KV is in blocks or will be after the step in flight,
        and the number of output tokens.
        """
        filled: dict[int, int] = {}
        for request, num_computed, num_outputs in progress:
            known = request.known
            self.state.set_num_output_tokens(known, num_outputs, self.step.time_ns)
            if known.num_computed_tokens == num_computed and request.is_running:
                continue
            filled.update(self.blocks_written(request, known.num_computed_tokens, num_computed))
            known.num_computed_tokens, known.state = num_computed, RequestState.RUNNING
            self.state.touch(known)
        self.blocks.fill(filled)

    def count_drafts(self, request: Request, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Set a request's total numbers of draft tokens and accepted draft tokens, and add the increase to the
        counters.
        """
        known = request.known
        self.state.count(
            draft_tokens=max(0, num_draft_tokens - known.num_draft_tokens),
            accepted_tokens=max(0, num_accepted_tokens - known.num_accepted_tokens),
        )
        known.num_draft_tokens, known.num_accepted_tokens = num_draft_tokens, num_accepted_tokens
        self.state.touch(known)

    def preempt_request(self, request: Request, time_ns: int) -> None:
        """Publish that a request lost its blocks and waits again.

        The event is not reported here: the caller reports it when it can determine the reason.
        """
        known = request.known
        known.state, known.num_computed_tokens = RequestState.PREEMPTED, 0
        known.num_preemptions += 1
        request.waiting_since_ns = time_ns
        self.state.count(preemptions=1)
        self.state.touch(known)

    def finish_request(self, request: Request, reason: str, num_blocks: int, *, is_aborted: bool = False) -> None:
        """Publish that a request ended. `reason` is a finish reason for `finished_text` or, with `is_aborted`,
        a clause for `aborted_text`.
        """
        known = request.known
        num_tokens = known.num_output_tokens
        if is_aborted:
            cause = aborted_text(reason, num_tokens, num_blocks)
        else:
            cause = finished_text(reason, num_tokens, num_blocks, max_tokens=known.info.max_tokens)
        self.state.finish(known)
        self.state.count(aborted=is_aborted, finished=not is_aborted)
        self.events.report(
            "aborted" if is_aborted else "finished", number=known.number, num_blocks=num_blocks, cause=cause
        )

    def set_wait_reasons(self, reasons: Iterable[tuple[Request, WaitsFor]]) -> list[tuple[Request, WaitsFor]]:
        """Publish the reasons for which these requests wait, and clear the reasons of all others.

        Returns the requests whose reason was cleared, each with its former reason.
        """
        before, self._waiting = self._waiting, {}
        for request, reason in reasons:
            self._waiting[request.known.number] = request
            if request.known.waits_for != reason:
                request.known.waits_for = reason
                self.state.touch(request.known)
        ended = []
        for number, request in before.items():
            if number not in self._waiting and number in self.state.requests:
                ended.append((request, request.known.waits_for))
                request.known.waits_for = WaitsFor.UNKNOWN
                self.state.touch(request.known)
        return ended

    def explain_miss(self, request: Request, num_cached: int, num_known: int) -> PrefixMiss:
        """Return why no more than `num_cached` of a request's `num_known` tokens were found in the prefix cache."""
        token = num_cached // self.block_size * self.block_size
        if token + self.block_size >= num_known:
            return PrefixMiss()
        block = self.missed_block(request, token)
        if block is None:
            return PrefixMiss()
        for value in block.hashes:
            evicted_at = self.evicted_hashes.step_of(value)
            if evicted_at is not None:
                return PrefixMiss("evicted", token, evicted_at)
        if block.is_cached:
            return PrefixMiss()
        if not token:
            return PrefixMiss(self.miss_at_start(request))
        is_followed = (self.state.ledger.parent == np.uint64(block.parent)).any()
        return PrefixMiss("differs" if is_followed else "unseen", token)

    def miss_at_start(self, request: Request) -> str:
        """Return why the first block of a prompt was not cached: "adapter" or "salt" if it is cached under
        another adapter or salt, otherwise "new".
        """
        text = self.texts.beginning_with(array("i", self.request_tokens(request, 0, self.block_size)))
        adapter, salt = self.request_key(request)
        if text is None or text.key == (adapter, salt):
            return "new"
        return "adapter" if text.key[0] != adapter else "salt"

    # Contents.

    def text_of(self, request: Request, start: int, count: int) -> CachedText:
        """Return `count` tokens of a request from position `start` on, to be stored in `texts` when they are cached."""
        tokens = array("i", self.request_tokens(request, start, start + count))
        notes = self.request_notes(request, start, count)
        return CachedText(request.known.number, start, tokens, self.request_key(request), notes)

    def contents(self, blocks: Sequence[int]) -> list[BlockContent]:
        """Return the contents of blocks. Blocks whose contents are unknown are returned without tokens."""
        return [self.block_content(block) for block in blocks]

    def block_content(self, block: int) -> BlockContent:
        ledger = self.state.ledger
        if block >= ledger.num_blocks:
            return BlockContent(block=block)
        owner, group = int(ledger.owner[block]), int(ledger.group[block])
        request = self.request_by_number(owner)
        if request is not None and block in request.known.tables[group]:
            start, end = self.block_span(request, group, request.known.tables[group].index(block), block)
            tokens = tuple(self.request_tokens(request, start, end))
            notes = self.request_notes(request, start, len(tokens))
            return BlockContent(block=block, number=owner, start=start, token_ids=tokens, notes=notes)
        text = self.texts.get(block)
        if text is None:
            return BlockContent(block=block)
        ids = tuple(text.token_ids)
        return BlockContent(block=block, number=text.number, start=text.start, token_ids=ids, notes=text.notes)
